"""How far two tensors lie apart, value by value: bits, ULP distances, NMSE and histograms of distances.

A frame of bins keeps a comparison of millions of values small enough for a report; `lab.plot.parity` draws it.
Knows nothing about layers, arms or tolerances.
"""

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from moe_lab.errors import LabError, LabTypeError, MissingExtra

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("arm_a", "arm_b", "kind", "bin_left", "bin_right", "count")
Kind = Literal["relative", "ulp"]
_INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def ulp_distance(a: Tensor, b: Tensor) -> np.ndarray:
    """Representable values between each pair: int64 [n], 0 = the same number (-0 and +0 are), 1 = neighbours.

    float32, float16 and bfloat16; both sides one dtype and shape, finite (the caller checks finiteness where it must).
    """
    if a.dtype != b.dtype or a.dtype not in _INTEGERS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _INTEGERS)
        raise LabTypeError(f"ULP distance needs one dtype of {names} on both sides, got {a.dtype} and {b.dtype}.")
    if a.shape != b.shape:
        raise LabError(f"ULP distance compares equal shapes, got {tuple(a.shape)} and {tuple(b.shape)}.")
    whole = _INTEGERS[a.dtype]

    def ordered(t: Tensor) -> Tensor:
        """Integers in the order of the floats: the sign bit set counts down from zero."""
        bits = t.detach().cpu().contiguous().view(whole).long()
        return torch.where(bits < 0, torch.iinfo(whole).min - bits, bits)

    return (ordered(a) - ordered(b)).abs().numpy().ravel()


def bits(t: Tensor) -> Tensor:
    """The bit patterns as integers, so that NaN equals the same NaN; -0 counts as 0."""
    whole = {4: torch.int32, 2: torch.int16, 8: torch.int64}[t.element_size()]
    return (t + 0.0).contiguous().view(whole)


def nmse(a: Tensor, b: Tensor) -> float:
    """sum (a - b)^2 / sum b^2 in float64; 0 for two empty or two zero tensors."""
    a, b = a.detach().double(), b.detach().double()
    error, power = float((a - b).square().sum()), float(b.square().sum())
    return 0.0 if error == 0 else error / power if power else float("inf")


def error_bins(a: Tensor, b: Tensor, *, arm_a: str, arm_b: str, kind: Kind = "relative") -> "pd.DataFrame":
    """Histogram of the distance between two tensors of one shape.

    kind "relative": |a - b| / rms(b), two bins an octave, [left, right); the first row, [0, 0], counts equal values.
    kind "ulp": `ulp_distance`, bins closed at both ends: [0, 0], [1, 1], [2, 3], [4, 7], ...
    Returns columns arm_a, arm_b, kind, bin_left, bin_right, count; the counts sum to the number of values.
    LabError: shapes that differ, NaN or infinity on either side; for "ulp" also dtypes that differ.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtra("pandas", "lab", "A histogram of errors") from error
    if a.shape != b.shape:
        raise LabError(f"error_bins compares equal shapes: {arm_a} has {tuple(a.shape)}, {arm_b} {tuple(b.shape)}.")
    for arm, values in ((arm_a, a), (arm_b, b)):
        if not torch.isfinite(values).all():
            raise LabError(f"error_bins found NaN or infinity in {arm}: such a value has no distance to another.")
    if kind == "ulp":
        edges = _ulp_edges(ulp_distance(a, b))
    elif kind == "relative":
        edges = _octaves(_relative(a, b))
    else:
        raise LabError(f"error_bins knows the kinds 'relative' and 'ulp', got {kind!r}.")
    return pd.DataFrame([(arm_a, arm_b, kind, *edge) for edge in edges], columns=list(COLUMNS))


def _relative(a: Tensor, b: Tensor) -> np.ndarray:
    left, right = a.detach().cpu().double(), b.detach().cpu().double()
    gap = (left - right).abs().numpy().ravel()
    rms = float(right.square().mean().sqrt()) if right.numel() else 0.0
    return gap / rms if rms else gap


def _ulp_edges(distance: np.ndarray) -> list[tuple[float, float, int]]:
    rows = [(0.0, 0.0, int((distance == 0).sum()))]
    low = 1
    while distance.size and low <= distance.max():
        high = 2 * low - 1
        rows.append((float(low), float(high), int(((distance >= low) & (distance <= high)).sum())))
        low = high + 1
    return rows


def _octaves(error: np.ndarray) -> list[tuple[float, float, int]]:
    """Half-octave bins [2^(i/2), 2^((i+1)/2)) from the smallest to the largest error that is not 0."""
    rows = [(0.0, 0.0, int((error == 0).sum()))]
    apart = error[error > 0]
    if apart.size:
        step = np.floor(2 * np.log2(apart)).astype(int)
        first = int(step.min())
        for i, count in enumerate(np.bincount(step - first), start=first):
            rows.append((2.0 ** (i / 2), 2.0 ** ((i + 1) / 2), int(count)))
    return rows
