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
from moe_lab.environment import environment
from moe_lab.errors import LabError, MissingExtra
from moe_lab.layer import MoELayer

if TYPE_CHECKING:
    import pandas as pd


def measure_batching(
    layer: MoELayer,
    x: Float[Tensor, "T D"],
    *,
    arms: Sequence[str | Arm] = ("per_token", "gemv"),
    tokens: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    repeats: int = 5,
    budget_s: float = 20.0,
) -> "pd.DataFrame":
    """Time the first n rows of x for each n of `tokens` and each arm (a name or an object); arms alternate within a
    repeat.

    Columns: arm, tokens, time_ms_p20, time_ms_p50, time_ms_p80, submissions, weight_bytes, n, backend, device. Cells
    that
    would pass `budget_s` in all are left out, largest first. LabError when x has fewer rows than asked.
    """
    try:
        import pandas as pd
    except ImportError as e:
        raise MissingExtra("pandas", "lab", "a batching sweep") from e
    if max(tokens) > x.shape[0]:
        raise LabError(f"{max(tokens)} tokens asked, but x has T={x.shape[0]} rows.")
    expect_arms(arms)
    env, rows, begin = environment(), [], time.perf_counter()
    for n in sorted(tokens):
        if time.perf_counter() - begin > budget_s:
            break
        calls: dict[str, list[Any]] = {}
        for repeat in range(repeats + 1):  # the first round warms up
            for arm in arms:
                y = layer(x[:n], arm)
                if repeat:
                    calls.setdefault(y.arm, []).append(y.timing)
        for arm, timings in calls.items():
            p20, p50, p80 = _quantiles([t.wall_ms for t in timings])
            last = timings[-1]
            rows.append(
                {"arm": arm, "tokens": n, "time_ms_p20": p20, "time_ms_p50": p50, "time_ms_p80": p80,
                 "submissions": last.submissions, "weight_bytes": last.weight_bytes, "n": repeats,
                 "backend": last.backend, "device": env["device"]}
            )  # fmt: skip
    return pd.DataFrame(rows)


def _quantiles(values: list[float]) -> tuple[float, float, float]:
    t = torch.tensor(values, dtype=torch.float64)
    return float(t.quantile(0.2)), statistics.median(values), float(t.quantile(0.8))
