"""Policies side by side on one trace, with the controls: how much of the way from LRU to the optimum does each go?

    gap_closed = (hits of the policy - hits of LRU) / (hits of Belady - hits of LRU)
on the same order of tokens and the same capacity: 0 is LRU, 1 the optimum, below 0 worse than LRU.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moe_lab.caching.controls import TEXT
from moe_lab.simulate.bounds import BELADY
from moe_lab.simulate.replay import AnyPolicy, check_policies
from moe_lab.simulate.requests import Trace, ids_of
from moe_lab.simulate.table import capacities, frame, simulate

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    *("order", "policy", "capacity_slots", "capacity_share", "requests", "hits", "misses"),
    *("hit_rate", "bytes_read", "gap_closed"),
)
POLICIES = ("static", "lfu", "lfuda", "lru", "random_oldest", "s3fifo", "lfu_decay", "predicted", BELADY)
CONTROL_POLICIES = ("lru", BELADY)


def study(
    trace: Trace | Mapping[str, Trace],
    capacity: int | Iterable[int],
    policies: Sequence[AnyPolicy] = POLICIES,
    *,
    per_layer: bool = True,
    step_tokens: int = 1,
    expert_bytes: int | Mapping[int, int] | None = None,
) -> "pd.DataFrame":
    """A row for each (order, capacity, policy): columns `COLUMNS`, sums over the layers.

    `trace`: one, or several by name as `lab.caching.controls` makes them; what is not in text order runs under LRU and
    Belady alone. LRU and Belady are added where `policies` lacks them, as gap_closed needs them (NaN where they do not
    differ). `expert_bytes`, errors: as lab.simulate.
    """
    check_policies(policies)
    orders = trace if isinstance(trace, Mapping) else {TEXT: trace}
    rows: list[tuple[Any, ...]] = []
    for order, one in orders.items():
        chosen = [*policies, *(name for name in CONTROL_POLICIES if name not in policies)]
        table = simulate(
            one, capacities(capacity), chosen if order == TEXT else CONTROL_POLICIES, per_layer=per_layer,
            step_tokens=step_tokens, expert_bytes=expert_bytes,
        )  # fmt: skip
        by_policy: Any = table.groupby(["capacity_slots", "policy"], sort=False)
        sums = by_policy[["requests", "hits", "misses"]].sum()
        read = by_policy["bytes_read"].sum(min_count=1)  # NaN where the sizes are not known
        _, layers, experts = ids_of(one)
        for (slots, policy), (requests, hits, misses) in zip(sums.index, sums.to_numpy().tolist(), strict=True):
            low, high = (sums.loc[(slots, name), "hits"] for name in CONTROL_POLICIES)
            closed = (hits - low) / (high - low) if high > low else float("nan")
            rate = hits / requests if requests else float("nan")
            share = slots / (len(layers) * experts) if experts else float("nan")
            rows.append((order, policy, slots, share, requests, hits, misses, rate, read.loc[slots, policy], closed))
    return frame(rows, COLUMNS)
