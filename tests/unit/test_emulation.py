"""The emulation of single choices: complete arithmetics, orders that agree, sums that are what they are called."""

from dataclasses import fields, replace

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab.formats import Arithmetic, quantize
from moe_lab.numerics.emulation import arithmetic_of, completed, emulate, emulate_rows, of_layout, quantize_for
from moe_lab.parity import nmse
from moe_lab.tolerances import tol
from moe_lab_kernels.mmq.operands import MMQ_LAYOUTS

ARMS = ("gemv", "mmq", "cpu")


def operands(format: str, t: int = 9, kd: int = 1024):
    draw = torch.Generator().manual_seed(6)
    return torch.randn(t, kd, generator=draw), quantize(torch.randn(12, kd, generator=draw) * 0.05, format)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("format", MMQ_LAYOUTS)
def test_an_arms_choices_are_complete(format: str, arm) -> None:
    made = arithmetic_of(format, arm)
    assert all(getattr(made, f.name) is not None for f in fields(made))
    assert (made.order, made.k_split) == ("blocks", 1)


def test_the_arms_differ_in_the_seven_choices_as_ggml_says() -> None:
    """kquants 2.4, q2_k."""
    assert arithmetic_of("q2_k", "gemv") == Arithmetic(
        32, "fp16", "integer", "quantised", "divide", "blocks", 1, True, "fp16"
    )
    assert arithmetic_of("q2_k", "mmq") == Arithmetic(64, "fp16", "fp16", "raw", "multiply", "blocks", 1, False, "fp16")
    assert arithmetic_of("q3_k", "mmq").scale_dtype == "fp32"
    assert arithmetic_of("q4_0", "gemv").sum == "raw"
    assert arithmetic_of("q4_0", "mmq").sum == "none"
    assert arithmetic_of("q6_k", "cpu").block == 256


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("format", ["q2_k", "q4_k", "q3_k", "q6_k", "q4_0", "nvfp4"])
def test_orders_and_splits_change_last_bits_alone(format: str, arm) -> None:
    x, q = operands(format)
    base = arithmetic_of(format, arm)
    exact = emulate(x, q, replace(base, order="exact"))
    outs = [emulate(x, q, replace(base, order=order, k_split=k))
            for order in ("blocks", "mmq", "super_blocks", "mmvq", "pairwise") for k in (1, 3)]  # fmt: skip
    assert max(nmse(out, exact) for out in outs) <= tol("mmq/emulation")
    assert len({tuple(out.flatten().tolist()) for out in outs}) > 3


@pytest.mark.parametrize("format", MMQ_LAYOUTS)
def test_exact_order_is_the_float64_dot_of_what_was_quantised(format: str) -> None:
    """Where nothing but the activations is rounded: codes times scales against decoded weights."""
    x, q = operands(format)
    made = replace(arithmetic_of(format, "gemv"), order="exact", product_dtype="integer", safe_sum=True,
                   sum="quantised")  # fmt: skip
    rows = quantize_for(x, format, made)
    want = rows.dequantize().double() @ q.dequantize().double().T
    assert nmse(emulate_rows(rows, q, made), want) < 1e-13


def test_products_are_rounded_as_told() -> None:
    x, q = operands("q4_k")
    base = replace(arithmetic_of("q4_k", "mmq"), order="exact")
    error = {p: nmse(emulate(x, q, replace(base, product_dtype=p)), emulate(x, q, replace(base, product_dtype="fp32")))
             for p in ("bf16", "fp16", "integer", "int8")}  # fmt: skip
    assert error["bf16"] > 10 * error["fp16"] > 0
    assert error["integer"] == error["int8"] < 1e-12


def test_raw_sums_of_two_bit_weights_keep_six_of_eight() -> None:
    x, q = operands("q2_k")
    base = replace(arithmetic_of("q2_k", "mmq"), order="exact")
    some, all_of_them = emulate(x, q, base), emulate(x, q, replace(base, sum="raw_all"))
    none = emulate(x, q, completed(Arithmetic(safe_sum=True), base))
    assert nmse(some, all_of_them) > 1e-6
    assert nmse(some, none) > nmse(some, all_of_them)


def test_a_choice_of_sums_replaces_sums_of_codes() -> None:
    base = arithmetic_of("q4_k", "gemv")
    assert completed(Arithmetic(sum="raw"), base).safe_sum is False
    assert completed(Arithmetic(safe_sum=True), arithmetic_of("q4_k", "mmq")).sum == "quantised"
    assert completed(Arithmetic(), base) == base


@pytest.mark.wrong_types
def test_refusals() -> None:
    x, q = operands("q4_k")
    with pytest.raises(LabError, match=r"q5_1.*q2_k"):
        arithmetic_of("q5_1", "mmq")
    with pytest.raises(LabError, match=r"'gemm'.*gemv, mmq, cpu"):
        arithmetic_of("q4_k", "gemm")  # type: ignore[arg-type]
    with pytest.raises(LabError, match=r"minima.*'none'"):
        emulate(x, q, Arithmetic(sum="none"))
    with pytest.raises(LabError, match=r"\[9, 512\] and \[12, 1024\]"):
        emulate(x[:, :512], q, Arithmetic())
    with pytest.raises(LabError, match="'fp8'"):
        of_layout("fp8")
    with pytest.raises(LabError, match="k_split=0"):
        Arithmetic(k_split=0)
    with pytest.raises(LabError, match=r"order='random'.*'blocks'"):
        Arithmetic(order="random")  # type: ignore[arg-type]
