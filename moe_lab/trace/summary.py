"""What a trace holds, a line a layer, counted piece by piece so that a file larger than memory can be summed up."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moe_lab.errors import LabError
from moe_lab.trace.record import RoutingTrace
from moe_lab.trace.values import NO_PICK


@dataclass(slots=True)
class LayerCount:
    """Counts of one layer: picks by id [R], skipped slots, and margins by their half-precision bits [2^16]."""

    width: int
    picks: np.ndarray = field(init=False)
    skipped: int = 0
    margins: np.ndarray = field(default_factory=lambda: np.zeros(1 << 16, np.int64))

    def __post_init__(self) -> None:
        self.picks = np.zeros(self.width, np.int64)

    def add(self, ids: np.ndarray, margin: np.ndarray | None) -> None:
        """ids [T, K] and margin [T] of the next tokens."""
        flat = ids.reshape(-1)
        kept = flat[flat != NO_PICK]
        self.picks += np.bincount(kept, minlength=self.width)
        self.skipped += len(flat) - len(kept)
        if margin is not None:
            with np.errstate(over="ignore"):  # beyond fp16 counts as infinite, which a median may be
                bits = np.abs(margin[~np.isnan(margin)]).astype(np.float16).view(np.uint16)
            self.margins += np.bincount(bits, minlength=1 << 16)

    @property
    def margin_median(self) -> float:
        """The lower median, to half precision: bits of non-negative numbers are in the numbers' order. NaN for none."""
        total = int(self.margins.sum())
        if not total:
            return float("nan")
        bits = int(np.searchsorted(np.cumsum(self.margins), (total + 1) // 2))
        return float(np.array(bits, np.uint16).view(np.float16))

    def row(self, experts: int) -> dict[str, Any]:
        """max_over_mean: the busiest expert's picks over the mean of all E; idle_share: experts never picked, of E;
        top_quarter_share: picks that went to the busiest quarter of the experts (rounded up), of picks of experts;
        zero_share and skipped_share: slots with a zero-computation expert, and with none, of all slots.
        """
        own = np.sort(self.picks[:experts])[::-1]
        total, slots = int(own.sum()), int(self.picks.sum()) + self.skipped
        share = lambda part, whole: float(part / whole) if whole else float("nan")  # noqa: E731
        return {
            "picks": total,
            "max_over_mean": share(own[0] * experts, total),
            "idle_share": share((own == 0).sum(), experts),
            "top_quarter_share": share(own[: -(-experts // 4)].sum(), total),
            "zero_share": share(self.picks[experts:].sum(), slots),
            "skipped_share": share(self.skipped, slots),
            "margin_median": self.margin_median,
        }


def summarize(trace: RoutingTrace | Iterable[RoutingTrace]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the trace (or its successive pieces) is, and a row a layer with the columns of `LayerCount.row`.

    The first: tokens, layers, experts (E), router_width (R), top_k (K), model_hash. LabError where there is no piece.
    """
    counts: dict[int, LayerCount] = {}
    first: RoutingTrace | None = None
    tokens = 0
    for piece in [trace] if isinstance(trace, RoutingTrace) else trace:
        first, tokens = first or piece, tokens + piece.tokens
        for i, number in enumerate(piece.layers):
            count = counts.setdefault(number, LayerCount(piece.width))
            count.add(piece.ids[:, i], None if piece.margin is None else piece.margin[:, i])
    if first is None:
        raise LabError("there is no piece of a trace to sum up.")
    about = {
        "tokens": tokens,
        "layers": len(first.layers),
        "experts": first.num_experts,
        "router_width": first.width,
        "top_k": first.top_k,
        "model_hash": first.model_hash,
    }
    return about, [{"layer": number, **count.row(first.num_experts)} for number, count in counts.items()]
