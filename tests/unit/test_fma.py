"""fma_ref rounds once, wherever the exact sum lies: against the sum made odd, and where rounding twice goes wrong."""

import pytest
import torch

from moe_lab_kernels.primitives import _rounded_once, fma_ref

UP, DOWN = 2.0**-12 * (1 + 2.0**-23), 2.0**-12 * (1 - 2.0**-23)
DRAWS = {
    "of one size": (1, 1, 1),
    "products far below": (1, 2.0**-24, 1),
    "subnormal": (2.0**-70, 2.0**-70, 2.0**-140),
    "infinite": (2.0**100, 2.0**28, 2.0**127),
}


@pytest.mark.parametrize("scale", DRAWS.values(), ids=DRAWS)
def test_bits_are_those_of_the_sum_made_odd(scale: tuple[float, float, float]) -> None:
    g = torch.Generator().manual_seed(1)
    shapes = ((64, 256), (64, 1), (64, 256))
    # few bits each, so that sums meet midpoints; NaN and infinity in some rows
    a, b, c = (torch.randint(-9, 10, s, generator=g).float() * k for s, k in zip(shapes, scale, strict=True))
    c[0], c[1], a[2] = float("nan"), float("inf"), float("-inf")
    a, b, c = (
        torch.cat([t, torch.randn(s, generator=g) * k]) for t, s, k in zip((a, b, c), shapes, scale, strict=True)
    )
    made, want = fma_ref(a, b, c), _rounded_once(*torch.broadcast_tensors(a, b, c))
    assert torch.equal(made.isnan(), want.isnan())
    assert torch.equal(made.nan_to_num(7).view(torch.int32), want.nan_to_num(7).view(torch.int32))


def test_where_rounding_twice_is_wrong() -> None:
    """1 + 2^-23 + 2^-24 - 2^-70 lies below a midpoint, and float64 rounds it onto one."""
    one = lambda v: torch.tensor([v], dtype=torch.float32)  # noqa: E731
    below = fma_ref(one(UP), one(DOWN), one(1 + 2.0**-23))
    assert float(below) == 1 + 2.0**-23
    assert float((one(UP).double() * one(DOWN).double() + one(1 + 2.0**-23).double()).float()) == 1 + 2.0**-22
    assert float(fma_ref(one(UP), one(-DOWN), one(-1 - 2.0**-23))) == -(1 + 2.0**-23)
    assert fma_ref(torch.zeros(0, 3), torch.zeros(0, 1), torch.zeros(0, 3)).shape == (0, 3)
