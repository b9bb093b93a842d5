"""What batching buys: the same rows one token at a time and together.

Two savings, kept apart: expert weights read once for several rows, and work handed over once instead of once a token.
"""

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from moe_lab._types import Float, Tensor
from moe_lab.arms import Arm
from moe_lab.bench.measure_arm import expect_arms
from moe_lab.errors import LabError, MissingExtra
from moe_lab.layer import MoELayer
from moe_lab.strategies import STRATEGIES, Prefilled, Strategy, as_strategy, prefill
from moe_lab.system.environment import environment

if TYPE_CHECKING:
    import pandas as pd


def measure_batching(
    layer: MoELayer,
    x: Float[Tensor, "T D"],
    *,
    arms: Sequence[str | Arm | Strategy] = ("per_token", "gemv"),
    tokens: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    repeats: int = 5,
    budget_s: float = 20.0,
) -> "pd.DataFrame":
    """Time the first n rows of x for each n of `tokens` and each of `arms`: arms (all rows at once) or strategies of
    `moe_lab.strategies`, by name or as objects; they alternate within a repeat.

    Columns: arm, tokens, time_ms_p20, time_ms_p50, time_ms_p80 (p50 also of route_ms and compute_ms), submissions,
    weight_bytes (NaN: the arm does not count them), n, backend, device. Cells that would pass `budget_s` in all are
    left out, largest first. LabError when x has fewer rows than asked.
    """
    try:
        import pandas as pd
    except ImportError as e:
        raise MissingExtra("pandas", "lab", "a batching sweep") from e
    if max(tokens) > x.shape[0]:
        raise LabError(f"{max(tokens)} tokens asked, but x has T={x.shape[0]} rows.")
    ways = _strategies(arms)
    env, rows, begin = environment(), [], time.perf_counter()
    for n in sorted(tokens):
        if time.perf_counter() - begin > budget_s:
            break
        calls: dict[str, list[Prefilled]] = {}
        for repeat in range(repeats + 1):  # the first round warms up
            for way in ways:
                y = prefill(layer, x[:n], way)
                if repeat:
                    calls.setdefault(way.name, []).append(y)
        rows += [{**_row(name, n, made), "device": env["device"]} for name, made in calls.items()]
    return pd.DataFrame(rows)


def _strategies(arms: Sequence[str | Arm | Strategy]) -> list[Strategy]:
    if isinstance(arms, str) or not arms:
        raise LabError(f"arms are {arms!r}; wanted a list of names or objects, at least one.")
    known = [a for a in arms if isinstance(a, Strategy) or (isinstance(a, str) and a in STRATEGIES)]
    own: list[Any] = [a for a in arms if a not in known]
    if own:
        expect_arms(own)
    made = [as_strategy(a) for a in arms]
    twice = sorted({s.name for s in made if [m.name for m in made].count(s.name) > 1})
    if twice:
        raise LabError(f"{twice[0]!r} was named twice; name each arm and strategy once.")
    return made


def _row(name: str, tokens: int, made: Sequence[Prefilled]) -> dict[str, Any]:
    p20, p50, p80 = _quantiles([y.wall_ms for y in made])
    phases = {p: statistics.median(y.total(p) for y in made) for p in ("route_ms", "compute_ms")}
    last = made[-1]
    return {
        "arm": name, "tokens": tokens, "time_ms_p20": p20, "time_ms_p50": p50, "time_ms_p80": p80, **phases,
        "submissions": last.submissions, "weight_bytes": last.total("weight_bytes"), "n": len(made),
        "backend": last.timings[-1].backend,
    }  # fmt: skip


def _quantiles(values: list[float]) -> tuple[float, float, float]:
    t = torch.tensor(values, dtype=torch.float64)
    return float(t.quantile(0.2)), statistics.median(values), float(t.quantile(0.8))
