"""ULP distances and histograms of errors."""

import numpy as np
import pytest
import torch

import moe_lab as lab
from moe_lab.numerics.distance import error_bins, ulp_distance

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_neighbours_are_one_apart_also_across_zero_and_signs(dtype: torch.dtype) -> None:
    tiny = torch.tensor(
        [torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps], dtype=dtype
    )  # smallest subnormal
    one = torch.ones(1, dtype=dtype)
    above = one + torch.finfo(dtype).eps
    assert ulp_distance(one, above).tolist() == [1]
    assert ulp_distance(-one, -above).tolist() == [1]
    assert ulp_distance(tiny, -tiny).tolist() == [2]
    assert ulp_distance(torch.zeros(1, dtype=dtype), -torch.zeros(1, dtype=dtype)).tolist() == [0]


def test_ulp_distance_counts_like_nextafter() -> None:
    start = np.float32(0.1)
    end = start
    for _ in range(1000):
        end = np.nextafter(end, np.float32(np.inf))
    assert ulp_distance(torch.tensor([start]), torch.tensor([end])).tolist() == [1000]


def test_farthest_floats_do_not_overflow() -> None:
    most = torch.finfo(torch.float32).max
    assert ulp_distance(torch.tensor([most]), torch.tensor([-most])).tolist() == [2 * 0x7F7FFFFF]


@pytest.mark.parametrize("kind", ["relative", "ulp"])
def test_bins_hold_every_value_once(kind: str) -> None:
    g = torch.Generator().manual_seed(1)
    a = torch.randn(999, generator=g)
    b = torch.where(torch.rand(999, generator=g) < 0.3, a, a * (1 + 1e-5 * torch.randn(999, generator=g)))
    bins = error_bins(a, b, arm_a="a", arm_b="b", kind=kind)
    assert int(bins["count"].sum()) == 999
    assert int(bins["count"].iloc[0]) == int((a == b).sum())
    assert bool((bins["bin_left"] <= bins["bin_right"]).all())
    assert bins["bin_left"].is_monotonic_increasing


def test_relative_error_is_over_the_rms_of_b() -> None:
    b = torch.tensor([3.0, 3.0, 3.0, 3.0])
    bins = error_bins(b + torch.tensor([0.0, 0.0, 0.0, 0.75]), b, arm_a="a", arm_b="b")
    hit = bins[(bins["count"] > 0) & (bins["bin_right"] > 0)]
    assert len(hit) == 1
    assert hit["bin_left"].item() <= 0.25 < hit["bin_right"].item()


def test_zero_reference_keeps_absolute_errors() -> None:
    bins = error_bins(torch.tensor([0.0, 0.5]), torch.zeros(2), arm_a="a", arm_b="b")
    assert bins["count"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("a", "b", "kind", "says"),
    [
        (torch.ones(2), torch.ones(3), "relative", r"x has \(2,\), y \(3,\)"),
        (torch.tensor([1.0, float("nan")]), torch.ones(2), "relative", "NaN or infinity in x"),
        (torch.ones(1), torch.tensor([float("inf")]), "ulp", "NaN or infinity in y"),
        (torch.ones(1), torch.ones(1).double(), "ulp", "torch.float32 and torch.float64"),
    ],
    ids=["shapes", "nan", "inf", "dtypes"],
)
def test_what_has_no_distance_is_refused(a: torch.Tensor, b: torch.Tensor, kind: str, says: str) -> None:
    with pytest.raises(lab.LabError, match=says):
        error_bins(a, b, arm_a="x", arm_b="y", kind=kind)
