"""Could the next layer's experts be read early? Predictions of its picks, from what is known one layer before.

For layer l and the MoE layer after it, l', on T recorded tokens:
    next router     l' routes layer l's MoE input (a streaming engine can, while l computes); the k' best choice scores
    previous token  the k' experts that l' picked most recently before this token, newest first
    popularity      the k' experts that l' picks most often over the same T tokens (seen beforehand, which flatters it)
True picks: l' on its own recorded input.
    recall = predicted and picked / picked,    precision = predicted and picked / predicted
Where a cache already holds an expert, nothing is read for it. With an LRU of S slots for l', fed by the true picks:
    would-be reads = predicted and not resident;  read_precision = picked among them / would-be reads
    miss_coverage  = picked among them / (picked and not resident)
All are ratios of sums over the tokens; NaN where nothing is divided by. Published figures use many denominators.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from moe_lab.activations import Activations, Inputs
from moe_lab.analysis.frames import frame
from moe_lab.analysis.recorded import layer_numbers, layer_of, recorded, rows_for
from moe_lab.analysis.scores import ranking
from moe_lab.checks import wants_whole, wants_wholes
from moe_lab.errors import LabError
from moe_lab.layer import MoELayer
from moe_lab.open import Checkpoint
from moe_lab.stream.policy import LRU
from moe_lab.stream.slots import SlotTable

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    *("layer", "next_layer", "predictor", "reads", "recall", "precision"),
    *("would_read", "read_precision", "miss_coverage", "cache_slots", "tokens"),
)
NEXT_ROUTER, PREVIOUS, POPULARITY = "next router", "previous token", "popularity"


def next_layer(
    model: Checkpoint | Mapping[int, MoELayer],
    inputs: Activations | Inputs,
    reads: Sequence[int] | None = None,
    *,
    cache_slots: int | None = None,
) -> "pd.DataFrame":
    """A row for each (pair of successive layers, predictor, k'): columns `COLUMNS`. Formulas: see the module.

    `model`: a Checkpoint, or layers by number. `inputs`: recorded MoE inputs of those layers; synthetic ones are
    refused. `reads`: the k' (default K..2K). `cache_slots`: S, the LRU's slots a layer (default a quarter of the
    experts, at least K). would_read: experts a token. LabError for fewer than two layers, too few slots, k' beyond R.
    """
    known, rows_of = layer_numbers(model, "next_layer"), recorded(inputs, "next_layer")
    reads = None if reads is None else wants_wholes("reads", reads)
    if cache_slots is not None:
        wants_whole("cache_slots", cache_slots)
    numbers = [n for n in known if n in rows_of.layers]
    if len(numbers) < 2:
        raise LabError(f"lab.analysis.next_layer needs two MoE layers with recorded inputs; there are {len(numbers)}.")
    rows = []
    for here, there in pairwise(numbers):
        layer = layer_of(model, there)
        k, e = layer.spec.top_k, layer.spec.num_experts
        slots = max(k, e // 4) if cache_slots is None else cache_slots
        widths = list(range(k, min(2 * k, e) + 1)) if reads is None else reads
        _check(widths, slots, layer)
        truth = ranking(layer, rows_for(layer, rows_of, there, "next_layer"), k).cpu().numpy()
        ahead = ranking(layer, rows_of.layer(here), max(widths)).cpu().numpy()
        picked = _hot(truth, e)
        resident = _resident(picked, slots)
        for predictor, order in _orders(truth, ahead, e):
            for width in widths:
                found = _measures(_hot(order[:, :width], e), picked, resident)
                rows.append((here, there, predictor, width, *found, slots, rows_of.tokens))
    return frame(rows, COLUMNS, "next_layer")


def _check(widths: Sequence[int], slots: int, layer: MoELayer) -> None:
    wide = layer.spec.router.width
    if not widths or min(widths) < 1 or max(widths) > wide:
        raise LabError(f"lab.analysis.next_layer: reads are {list(widths)}; each must lie in 1..{wide} (R={wide}).")
    if slots < layer.spec.top_k:
        raise LabError(f"lab.analysis.next_layer: cache_slots={slots} hold no token's K={layer.spec.top_k} experts.")


def _orders(truth: np.ndarray, ahead: np.ndarray, experts: int) -> Iterator[tuple[str, np.ndarray]]:
    """Each predictor's ids [T, n], best first; E stands where it names none."""
    yield NEXT_ROUTER, ahead
    yield PREVIOUS, _most_recent(truth, experts)
    often = np.argsort(-_hot(truth, experts).sum(axis=0), kind="stable")
    yield POPULARITY, np.broadcast_to(often, (len(truth), experts))


def _most_recent(truth: np.ndarray, experts: int) -> np.ndarray:
    """Before each token, the experts picked so far, newest first (within a token by rank), filled up with E."""
    order = np.full((len(truth), experts), experts)
    recent: list[int] = []
    for t, picks in enumerate(truth.tolist()):
        order[t, : len(recent)] = recent
        real = [e for e in dict.fromkeys(picks) if 0 <= e < experts]
        recent = real + [e for e in recent if e not in real]
    return order


def _hot(ids: np.ndarray, experts: int) -> np.ndarray:
    """bool [T, E] of ids [T, n]; what is no expert with weights is left out."""
    hot = np.zeros((len(ids), experts + 1), dtype=bool)
    np.put_along_axis(hot, np.where((ids < 0) | (ids > experts), experts, ids).astype(np.int64), True, axis=1)
    return hot[:, :experts]


def _resident(picked: np.ndarray, slots: int) -> np.ndarray:
    """bool [T, E]: what the layer's LRU holds before each token."""
    table = SlotTable(range(slots), LRU())
    held = np.zeros_like(picked)
    for t, row in enumerate(picked):
        held[t, [e for _, e in table.resident]] = True
        keys = [(0, int(e)) for e in np.flatnonzero(row)]
        taken = table.take(keys)
        assert taken is not None  # slots >= K
        for key in keys:
            table.put_back(key)
    return held


def _measures(
    predicted: np.ndarray, picked: np.ndarray, resident: np.ndarray
) -> tuple[float, float, float, float, float]:
    """recall, precision, would_read, read_precision, miss_coverage."""
    right, read, missed = predicted & picked, predicted & ~resident, picked & ~resident
    useful = (right & ~resident).sum()
    return (
        _ratio(right.sum(), picked.sum()), _ratio(right.sum(), predicted.sum()), _ratio(read.sum(), len(picked)),
        _ratio(useful, read.sum()), _ratio(useful, missed.sum()),
    )  # fmt: skip


def _ratio(part: np.integer, whole: np.integer | int) -> float:
    return float(part / whole) if whole else float("nan")
