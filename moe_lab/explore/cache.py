"""Explorers of caches: capacity and policy on one trace, and how many experts to read ahead."""

from collections.abc import Iterable, Sequence
from functools import cache as remembered
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_lab.analysis.picks import wants_trace
from moe_lab.checks import wants_whole, wants_wholes
from moe_lab.errors import LabError
from moe_lab.explore.explorer import Explorer
from moe_lab.explore.pair import PairExplorer
from moe_lab.plots.figure import remember
from moe_lab.plots.style import OKABE_ITO, Axes, LabFigure, arm_styles, need_columns, plt, style, ticker
from moe_lab.simulate.bounds import BELADY
from moe_lab.simulate.replay import AnyPolicy, check_policies
from moe_lab.simulate.table import simulate
from moe_lab.stream.policy import policy_name
from moe_lab.trace import RoutingTrace

if TYPE_CHECKING:
    import pandas as pd

POLICIES = ("lru", "random_oldest", "lfu_decay", "s3fifo", "predicted", "static")
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
PREDICTION = ("layer", "next_layer", "predictor", "reads", "read_precision", "miss_coverage", "cache_slots", "tokens")
_REFERENCES = ("lru", BELADY)


def cache(
    trace: RoutingTrace,
    *,
    capacities: Iterable[int] | None = None,
    policies: Sequence[AnyPolicy] = POLICIES,
    tokens: int = 1024,
    step_tokens: int = 1,
) -> PairExplorer:
    """Hit rate by layer at one capacity under one policy, between LRU and the optimum; and its way over capacities.

    `capacities`: slots of the whole cache, split over the layers; default an eighth to three quarters of the experts.
    The first `tokens` tokens are replayed, once for each capacity and policy. LabError as lab.simulate.
    """
    wants_trace("lab.explore.cache", trace)
    wants_whole("tokens (of lab.explore.cache)", tokens)
    if trace.tokens == 0 or tokens < 1:
        raise LabError(f"lab.explore.cache of {tokens} tokens from a trace of {trace.tokens}: wanted at least 1.")
    check_policies(policies)
    part = trace.part(0, min(tokens, trace.tokens))
    layers = len(trace.layers)
    per_layer = sorted({max(1, round(share * trace.num_experts)) for share in SHARES})
    least = len(trace.layers)
    slots = [n * layers for n in per_layer] if capacities is None else wants_wholes("capacities", capacities, least)
    names = {policy_name(policy): policy for policy in policies}

    @remembered
    def table(name: str) -> Any:
        return simulate(part, slots, [names.get(name, name)], per_layer=True, step_tokens=step_tokens)

    return PairExplorer(
        slots,
        list(names),
        lambda at, name: _cache_frame({n: table(n) for n in dict.fromkeys((name, *_REFERENCES))}, at, name),
        labels=("slots", "policy"),
        start=(len(slots) // 3, 0),
    )


def prefetch(df: "pd.DataFrame") -> Explorer:
    """Reading k' experts ahead of each layer: misses covered, bytes read for each byte of use, one k' at a time.

    `df`: rows of `lab.analysis.next_layer`.
    """
    need_columns(df, PREDICTION, "prefetch")
    by_width: Any = dict(tuple(df.groupby("reads")))
    return Explorer(
        sorted(by_width), lambda width: _prefetch_frame(by_width[width]), label="experts read ahead", unit="a token"
    )


def _cache_frame(tables: dict[str, Any], slots: int, policy: str) -> LabFigure:
    with style():
        figure: Any = plt.figure(FigureClass=LabFigure, figsize=(9.6, 3.6))
        left, right = figure.add_axes((0.07, 0.16, 0.42, 0.7)), figure.add_axes((0.58, 0.16, 0.4, 0.7))
        here = {name: table[table["capacity_slots"] == slots] for name, table in tables.items()}
        _by_layer(left, here, policy)
        _by_capacity(right, tables, slots)
        rates = {name: rows["hits"].sum() / max(rows["requests"].sum(), 1) for name, rows in here.items()}
        lru, best = rates["lru"], rates[BELADY]
        closed = f", {(rates[policy] - lru) / (best - lru):+.0%} of the way from LRU to it" if best > lru else ""
        left.set_title(f"{policy} hits {rates[policy]:.1%}, the optimum {best:.1%}", fontsize=9.5, pad=6)
        figure.alt = f"{policy} hits {rates[policy]:.1%} of the requests, LRU {lru:.1%}, Belady {best:.1%}{closed}."
    return figure


def _by_layer(axes: Axes, here: dict[str, Any], policy: str) -> None:
    rows = here[policy]
    remember(axes, "cache", rows, {})
    axes.bar(range(len(rows)), rows["hit_rate"], color=OKABE_ITO[0], width=0.76, label=policy)
    for name, mark, size in zip(_REFERENCES, ("_", "D"), (9, 4), strict=True):
        if name != policy:  # its bars are there
            axes.plot(range(len(rows)), here[name]["hit_rate"], mark, color="black", markersize=size, label=name)
    axes.set_xticks(range(len(rows)), [str(layer) for layer in rows["layer"]])
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=0))
    axes.set_xlabel(f"layer (n = {int(rows['requests'].max()):,} requests)")
    axes.set_ylabel("hit rate")
    axes.legend(fontsize=8, loc="upper left", ncols=3, handlelength=1.4)


def _by_capacity(axes: Axes, tables: dict[str, Any], slots: int) -> None:
    for name, look in arm_styles(tables).items():
        sums = tables[name].groupby("capacity_slots")[["hits", "requests"]].sum()
        axes.plot(sums.index, 1 - sums["hits"] / sums["requests"], label=name, **{**look, "markersize": 4.5})
    axes.axvline(slots, color="#8C8C8C", linewidth=1, linestyle="--")
    axes.set_ylim(0, 1)
    axes.set_xlabel("slots, all layers")
    axes.set_title("miss ratio", fontsize=9.5, pad=6)
    axes.grid(True)
    axes.legend(fontsize=8, loc="upper right", handlelength=3)


def _prefetch_frame(rows: Any) -> LabFigure:
    pairs = [f"{a}→{b}" for a, b in rows[["layer", "next_layer"]].drop_duplicates().to_numpy().tolist()]
    predictors = list(dict.fromkeys(rows["predictor"]))
    with style():
        figure: Any = plt.figure(FigureClass=LabFigure, figsize=(9.6, 3.6))
        left, right = figure.add_axes((0.07, 0.16, 0.42, 0.7)), figure.add_axes((0.57, 0.16, 0.41, 0.7))
        remember(left, "prefetch", rows, {})
        width = 0.8 / len(predictors)
        for i, (name, look) in enumerate(arm_styles(predictors).items()):
            mine = rows[rows["predictor"] == name]
            hatch = ("", "///", "...", "xx")[i % 4]
            for axes, values in ((left, mine["miss_coverage"]), (right, 1 / mine["read_precision"])):
                known = np.where(np.isfinite(values), values, np.nan)  # nothing to cover, or nothing read, has no bar
                at = np.arange(len(mine)) - 0.4 + (i + 0.5) * width
                axes.bar(at, known, width=width, color=look["color"], hatch=hatch, edgecolor="white", label=name)
        for axes, title in ((left, "misses that were being read already"), (right, "bytes read for a byte of use")):
            axes.set_xticks(range(len(pairs)), pairs)
            axes.set_title(title, fontsize=9.5, pad=6)
            axes.grid(axis="y")
        left.set_ylim(0, 1)
        left.yaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=0))
        slots = int(rows["cache_slots"].iloc[0])
        left.set_xlabel(f"layer → next (n = {int(rows['tokens'].max()):,} tokens, LRU of {slots} slots a layer)")
        right.set_ylim(top=1.3 * right.get_ylim()[1])
        right.legend(fontsize=8, handlelength=1.6, loc="upper left", ncols=len(predictors))
        first: Any = rows[rows["predictor"] == predictors[0]].dropna(subset=["miss_coverage", "read_precision"])
        covered, spent = first["miss_coverage"].median(), (1 / first["read_precision"]).median()
        figure.alt = (
            f"{predictors[0]} covers {covered:.0%} of the misses (median pair) at {spent:.2f} bytes a useful byte."
        )
    return figure
