"""Faults that other projects' activation quantisers had (Q02, Q04, Q26, Q29), each with its own input."""

import warnings

import pytest
import torch

from moe_lab.formats import Arithmetic, quantize_activations
from moe_lab_kernels.rows.arithmetic import LAYOUTS
from moe_lab_kernels.rows.quantize_fp8 import quantize_fp8_ref

WAYS = ("divide", "reciprocal", "multiply")


@pytest.mark.parametrize("rounding", WAYS)
@pytest.mark.parametrize("amax", [6.3e-38, 1e-44], ids=str)
def test_q02_the_inverse_of_a_tiny_scale_overflows(amax: float, rounding: str) -> None:
    x = torch.linspace(-1, 1, 128)[None] * amax
    rows = quantize_activations(x, "fp8", Arithmetic(rounding=rounding))
    assert rows.scale.isfinite().all()
    assert rows.codes.float().isfinite().all()
    assert ((rows.dequantize() - x).abs() <= amax).all()


def test_q04_overflow_to_e4m3_saturates_and_nan_stays() -> None:
    """A scale of 1: the group's largest is 448, and what would pass it is never cast."""
    for top in (464.0, 465.0, 1000.0, -1000.0):
        x = torch.zeros(1, 128)
        x[0, 0], x[0, 1] = top, float("nan")
        codes, scale = quantize_fp8_ref(x, Arithmetic(rounding="multiply"))
        assert codes.float()[0, 0] == (448 if top > 0 else -448)
        assert codes.view(torch.uint8)[0, 1] == 0x7F
        assert scale.item() == pytest.approx(abs(top) / 448)
    flagged = quantize_activations(torch.full((1, 128), float("inf")), "fp8")
    assert flagged.scale.isinf().all(), "an infinity shows in its scale"


@pytest.mark.parametrize("layout", ["q8_1", "ds4", "d2s6"])
def test_q26_safe_sums_do_not_overflow(layout: str) -> None:
    x = torch.full((1, 256), 3000.0)
    rows = quantize_activations(x, layout, Arithmetic(safe_sum=True))
    group = rows.layout.sum_group
    sums = rows.total.float() * rows.scale.float().repeat_interleave(rows.layout.block // group, 1)
    assert (sums / (group * 3000) - 1).abs().max() <= 2**-11, "one fp16 scale's rounding"
    if group == 32:
        assert quantize_activations(x, layout).total.isinf().all(), "this input would not show the fault"


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "fp8"])
@pytest.mark.parametrize("rounding", WAYS)
def test_q29_a_block_of_subnormals_is_zero_without_a_warning(layout: str, rounding: str) -> None:
    x = torch.zeros(1, 256)
    x[0, 3] = 1e-40
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = quantize_activations(x, layout, Arithmetic(rounding=rounding, scale_dtype="fp16"))
    assert not rows.scale.any()
    assert rounding == "divide" or not rows.codes.any()
    assert not rows.dequantize().any()
