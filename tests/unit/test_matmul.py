"""`lab.matmul` against ggml's products in numpy (C9), its accuracy against the recorded findings, and its refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import moe_lab as lab
from moe_lab.errors import LabError
from moe_lab.formats import quantize, quantize_activations
from moe_lab.numerics.emulation import arithmetic_of, emulate
from moe_lab.numerics.matmul import ACTIVATIONS
from moe_lab.parity import nmse
from moe_lab.tolerances import tol
from moe_lab_kernels.mmq.operands import FOLDED, MMQ_LAYOUTS
from tests.support import ggml_arms

FORMATS = tuple(MMQ_LAYOUTS)
# NMSE on Gaussian rows and heavy-tailed weights: decode arm, prefill arm
FINDINGS = {"q2_k": (2.9e-5, 1.2e-4), "q4_k": (2.9e-5, 2.0e-4), "q4_0": (2.2e-4, 2.8e-5)}
SAME_ARMS = ("q3_k", "q6_k", "q8_0", "mxfp4", "nvfp4")


def heavy(n: int, kd: int, seed: int) -> torch.Tensor:
    """Student-t weights with six degrees of freedom."""
    draw = torch.Generator().manual_seed(seed)
    chi = torch.randn(6, n, kd, generator=draw).square().sum(0)
    return torch.randn(n, kd, generator=draw) * (6 / chi).sqrt() * 0.03


def gaussian(t: int, kd: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(t, kd, generator=torch.Generator().manual_seed(seed))


def arm_of(name: str):
    return {"gemv": ggml_arms.decode_arm, "mmq": ggml_arms.prefill_arm}[name]


@pytest.mark.parametrize("kind", ["gaussian", "sizes", "zero-blocks"])
@pytest.mark.parametrize("arm", ["gemv", "mmq"])
@pytest.mark.parametrize("format", FORMATS)
def test_is_ggmls_arithmetic(format: str, arm: str, kind: str) -> None:
    x = gaussian(13, 1024)
    if kind == "sizes":
        x = x * torch.exp(3 * gaussian(13, 1024, 4))
    if kind == "zero-blocks":
        x[3, 64:320] = 0
        x[5] = 0
    q = quantize(heavy(24, 1024, 1), format)
    got, want = lab.matmul(x, q, arm), torch.from_numpy(arm_of(arm)(q.data.numpy(), x.numpy(), format))
    assert nmse(got, want) <= tol("mmq/emulation")
    if kind == "zero-blocks":
        assert (got[5] == 0).all()


@pytest.mark.parametrize("format", FOLDED)
def test_the_folded_form_is_ggmls_cpu_arithmetic(format: str) -> None:
    x, q = gaussian(13, 1024) * 3, quantize(heavy(24, 1024, 1), format)
    want = torch.from_numpy(ggml_arms.cpu_arm(q.data.numpy(), x.numpy(), format))
    for arm in ("mmq", "gemv"):
        assert nmse(lab.matmul(x, q, arm, activation="q8_k"), want) <= tol("mmq/emulation")


@pytest.fixture(scope="module")
def arms() -> dict[str, tuple[float, float, float]]:
    """format -> NMSE of decode arm and prefill arm against unquantised activations, and between them: 512 tokens."""
    x, w, out = gaussian(512, 2048), heavy(24, 2048, 2), {}
    for format in FORMATS:
        q = quantize(w, format)
        exact = x.double() @ q.dequantize().double().T
        v, m = (lab.matmul(x, q, arm) for arm in ("gemv", "mmq"))
        out[format] = nmse(v, exact), nmse(m, exact), nmse(v, m)
    return out


@pytest.mark.parametrize("format", FINDINGS)
def test_accuracy_is_what_was_found(arms: dict, format: str) -> None:
    """Raw sums cost the prefill arm of q2_k and q4_k, and the decode arm of q4_0."""
    for got, found in zip(arms[format][:2], FINDINGS[format], strict=True):
        assert abs(got / found - 1) <= tol("mmq/finding"), (got, found)


@pytest.mark.parametrize("format", SAME_ARMS)
def test_arms_without_raw_sums_agree(arms: dict, format: str) -> None:
    assert 0 < arms[format][2] <= tol("mmq/arms")


@pytest.mark.parametrize("format", ["q2_k", "q4_k"])
def test_the_cause_is_the_raw_sums(format: str) -> None:
    """Not the block of 64, nor fp16 products: each choice alone, sums in float64."""
    x, q = gaussian(512, 2048), quantize(heavy(24, 2048, 2), format)
    exact = x.double() @ q.dequantize().double().T
    base = replace(arithmetic_of(format, "gemv"), order="exact")
    goal = arithmetic_of(format, "mmq")
    error = {
        "none": nmse(emulate(x, q, base), exact),
        "block": nmse(emulate(x, q, replace(base, block=64)), exact),
        "product": nmse(emulate(x, q, replace(base, product_dtype="fp16")), exact),
        "sums": nmse(emulate(x, q, replace(base, sum=goal.sum, safe_sum=False)), exact),
        "fp32 sums": nmse(emulate(x, q, replace(base, sum="raw_all", sum_dtype="fp32", safe_sum=False)), exact),
    }
    assert error["sums"] > 2.5 * error["none"]
    assert error["fp32 sums"] > 2.5 * error["none"]
    assert error["block"] < 1.5 * error["none"]
    assert error["product"] < 1.2 * error["none"]


@pytest.mark.parametrize("format", ["q2_k", "q4_k", "q5_k"])
def test_sums_past_fp16_are_nan_and_safe_sums_are_not(format: str) -> None:
    """Where a minimum is 0, infinity times it is NaN."""
    x, w = torch.full((3, 512), 6000.0), heavy(24, 512, 3)
    w[:, 128:192] = w[:, 128:192].abs()  # minima of 0
    q = quantize(w, format)
    assert quantize_activations(x, MMQ_LAYOUTS[format]).overflowed() > 0
    assert not lab.matmul(x, q, "mmq").isfinite().all()
    assert lab.matmul(x, q, "gemv").isfinite().all()
    safe = lab.matmul(x, q, "mmq", arithmetic=lab.Arithmetic(safe_sum=True))
    assert nmse(safe, x.double() @ q.dequantize().double().T) <= tol("gemv/layer")


def test_tiny_rows_lose_fp16_scales() -> None:
    """q3_k's prefill scales are fp32; the decode arm's become subnormal."""
    x, q = gaussian(64, 1024) * 3e-5, quantize(heavy(24, 1024, 2), "q3_k")
    exact = x.double() @ q.dequantize().double().T
    assert nmse(lab.matmul(x, q, "mmq"), exact) <= tol("gemv/product") < 3e-4 < nmse(lab.matmul(x, q, "gemv"), exact)


@pytest.mark.parametrize("arm", ["gemv", "mmq", "q8_k"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_rows_bits_are_its_own(format: str, arm: str) -> None:
    x, q = gaussian(519, 512), quantize(heavy(8, 512, 2), format)
    product = (lambda v: lab.matmul(v, q, "mmq", "q8_k")) if arm == "q8_k" else (lambda v: lab.matmul(v, q, arm))
    whole = product(x)
    for t in (1, 2, 8, 9, 63, 64, 65):
        assert torch.equal(product(x[-t:]), whole[-t:]), t


def test_gemv_of_values_is_named_where_codes_are_refused() -> None:
    q = quantize(torch.ones(4, 128), "int4_g32")
    with pytest.raises(LabError, match="not int4_g32; with activation='bf16' it does"):
        lab.matmul(torch.ones(2, 128), q)
    assert lab.matmul(torch.ones(2, 128), q, activation="bf16").shape == (2, 4)


@pytest.mark.parametrize("activation", [None, "bf16", "fp8", "q8_1", "d4", "q8_k"])
def test_gemm_multiplies_values(activation: str | None) -> None:
    x, q = gaussian(9, 512), quantize(heavy(8, 512, 2), "q4_k")
    w = q.dequantize()
    if activation == "bf16":
        x2, w = x.bfloat16().float(), w.bfloat16().float()
    else:
        x2 = x if activation is None else quantize_activations(x, activation).dequantize()
    assert torch.equal(lab.matmul(x, q, "gemm", activation), (x2.double() @ w.double().T).float())


@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a not in ("fp8", "bf16")])
@pytest.mark.parametrize("arm", ["gemv", "mmq"])
def test_any_int8_layout_can_be_asked_for(arm: str, activation: str) -> None:
    x, q = gaussian(64, 512), quantize(heavy(16, 512, 2), "q4_k")
    assert nmse(lab.matmul(x, q, arm, activation), x.double() @ q.dequantize().double().T) < tol("gemv/layer")


def test_single_choices_change_the_kernels_product_as_they_change_the_emulation() -> None:
    x, q = gaussian(64, 512).bfloat16().float(), quantize(heavy(16, 512, 2), "q2_k")
    own = arithmetic_of("q2_k", "mmq")
    plain = lab.matmul(x, q, "mmq")
    for change in ({"scale_dtype": "fp32"}, {"sum": "raw_all"}, {"safe_sum": True}, {"rounding": "divide"}):
        asked = lab.Arithmetic(**change)
        got = lab.matmul(x, q, "mmq", arithmetic=asked)
        more = {"sum": "quantised"} if change.get("safe_sum") else {}
        assert nmse(got, emulate(x, q, replace(own, **change, **more))) <= tol("mmq/emulation"), change
        assert not torch.equal(got, plain), change


def test_foreign_orders_and_splits_change_last_bits_alone() -> None:
    x, q = gaussian(64, 2048), quantize(heavy(16, 2048, 2), "q4_k")
    plain = lab.matmul(x, q, "mmq")
    for change in ({"order": "mmvq"}, {"order": "pairwise"}, {"order": "mmq"}, {"k_split": 3}, {"order": "exact"}):
        other = lab.matmul(x, q, "mmq", arithmetic=lab.Arithmetic(**change))  # type: ignore[arg-type]
        assert 0 < nmse(other, plain) <= tol("mmq/emulation"), change


def test_no_rows_and_no_outputs() -> None:
    q = quantize(heavy(8, 256, 2), "q8_0")
    for arm in ("gemv", "mmq", "gemm"):
        assert lab.matmul(torch.empty(0, 256), q, arm).shape == (0, 8)  # type: ignore[arg-type]


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.ones(2, 128)}, r"\[T, Kd\].*\[2, 128\].*\[8, 256\]"),
        ({"x": torch.ones(2, 256, dtype=torch.int32)}, "int32"),
        ({"arm": "table"}, "'table'.*gemv, mmq, gemm"),
        ({"activation": "q8_2"}, "'q8_2'.*q8_1"),
        ({"activation": "fp8"}, "int8 codes.*fp8.*gemm"),
        ({"arithmetic": 3}, "Arithmetic"),
        ({"q": "q8_0"}, "QuantTensor"),
        ({"q": quantize(torch.ones(8, 256), "bf16")}, "bf16.*gemm"),
        ({"arm": "gemm", "arithmetic": lab.Arithmetic(order="mmq")}, "order"),
        ({"arithmetic": lab.Arithmetic(sum="none"), "q": quantize(torch.ones(8, 256), "q4_k")}, "minima"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_refusals(change: dict, said: str) -> None:
    call = {"x": torch.ones(2, 256), "q": quantize(heavy(8, 256, 2), "q8_0"), "arm": "gemv"} | change
    with pytest.raises(lab.LabError, match=said):
        lab.matmul(**call)


def test_numpy_unpacks_what_the_lab_decodes() -> None:
    """The emulation's own decoding, so that a shared mistake cannot hide."""
    for format in FORMATS:
        q = quantize(heavy(4, 512, 5), format)
        w = ggml_arms.unpack(q.data.numpy(), format)
        per = w.codes.shape[-1] // max(w.d.shape[-1], 1 if w.scales is None else w.scales.shape[-1])
        step = np.repeat((w.d * (1 if w.scales is None else w.scales)).astype(np.float32), per, -1)
        values = step * w.codes.astype(np.float32)
        if w.mins is not None:
            values = values - np.repeat((w.dmin * w.mins).astype(np.float32), per, -1)
        assert np.array_equal(values.reshape(4, -1), q.dequantize().numpy()), format
