"""Explorers of routing: expert load of one layer at a time, and everything about one layer in one stretch of text."""

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_lab.analysis.picks import wants_trace
from moe_lab.checks import came, wants_whole, wants_wholes
from moe_lab.errors import LabError, LabTypeError
from moe_lab.explore.explorer import MOST_FRAMES, Explorer
from moe_lab.explore.pair import PairExplorer
from moe_lab.explore.routing_frame import routing_frame
from moe_lab.plots import load as plot_load
from moe_lab.plots.style import need_columns
from moe_lab.trace import RoutingTrace

if TYPE_CHECKING:
    import pandas as pd

Range = tuple[int, int]


def load(df: "pd.DataFrame | RoutingTrace") -> Explorer:
    """Expert load of one layer at a time; `df` as `lab.plot.load` takes it: layer, expert, assignments, or a trace."""
    frame = df.load_table() if isinstance(df, RoutingTrace) else df
    if not hasattr(frame, "columns"):
        raise LabTypeError(f"lab.explore.load wants a RoutingTrace or the DataFrame of its load, got {came(df)}.")
    need_columns(frame, ("layer", "expert", "assignments"), "load")
    by_layer: Any = dict(tuple(frame.groupby("layer")))
    return Explorer(sorted(by_layer), lambda layer: plot_load(by_layer[layer]), label="layer")


def routing(
    trace: RoutingTrace,
    *,
    layers: Iterable[int] | None = None,
    ranges: Sequence[Range] | None = None,
    tokens: int = 256,
) -> PairExplorer:
    """One layer in one stretch of tokens: load of each expert, who picks whom token by token, the union curve.

    `ranges`: (start, stop) token numbers. Default: the first `tokens` tokens of each domain where the trace names
    domains, else of each eighth of the trace. Without `layers` as many evenly spaced ones as a page holds (it warns
    when that is not all). LabError for ranges outside the trace or too many frames.
    """
    wants_trace("lab.explore.routing", trace)
    wants_whole("tokens", tokens)
    spans = _default_ranges(trace, tokens) if ranges is None else [_pair(one) for one in ranges]
    for start, stop in spans:
        if not 0 <= start < stop <= trace.tokens:
            raise LabError(f"tokens {start}..{stop} of a trace of {trace.tokens}: wanted 0 <= start < stop <= T.")
    chosen = _fitting(trace.layers, len(spans)) if layers is None else wants_wholes("layers", layers)
    return PairExplorer(
        chosen,
        spans,
        lambda layer, span: routing_frame(trace, layer, *span),
        labels=("layer", "tokens"),
        show=lambda span: _range_name(trace, span),
        start=(len(chosen) // 2, 0),
    )


def _pair(given: Range) -> Range:
    pair = wants_wholes("a range of tokens", given)
    if len(pair) != 2:
        raise LabError(f"a range of tokens is {pair}; wanted (start, stop).")
    return pair[0], pair[1]


def _default_ranges(trace: RoutingTrace, tokens: int) -> list[Range]:
    if trace.tokens == 0 or tokens < 1:
        raise LabError(f"an explorer of {tokens} tokens at a time from a trace of {trace.tokens}: wanted at least 1.")
    if trace.domains is not None:
        names = trace.domains.astype(str)
        starts = [0, *(np.flatnonzero(names[1:] != names[:-1]) + 1).tolist()]
        stops = [*starts[1:], trace.tokens]
        runs = list(zip(starts, stops, strict=True))[:MOST_FRAMES]
        return [(a, min(a + tokens, b)) for a, b in runs]
    starts = sorted({i * trace.tokens // 8 for i in range(8)})
    return [(a, min(a + tokens, trace.tokens)) for a in starts]


def _fitting(layers: tuple[int, ...], spans: int) -> list[int]:
    most = max(1, MOST_FRAMES // spans)
    if len(layers) <= most:
        return list(layers)
    places = sorted({round(i * (len(layers) - 1) / max(most - 1, 1)) for i in range(most)})
    warnings.warn(f"{len(places)} of the trace's {len(layers)} layers, evenly spaced, fit a page.", stacklevel=3)
    return [layers[i] for i in places]


def _range_name(trace: RoutingTrace, span: Range) -> str:
    start, stop = span
    where = f"{start} to {stop - 1}"
    if trace.domains is None:
        return where
    names = list(dict.fromkeys(trace.domains[start:stop].astype(str)))
    return f"{where} ({names[0]})" if len(names) == 1 else where
