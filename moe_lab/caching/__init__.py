"""`lab.caching`: which experts should stay? Questions about caches, answered from a trace by tidy DataFrames.

controls          traces that lack order, domains, co-picks or skew            (of a trace, by name)
miss_ratio        misses by capacity and policy; the LRU's whole curve         lab.plot.miss_ratio
stack_distance    how large an LRU each request would need                     lab.plot.stack_distance
study             policies side by side, share of the gap to the optimum       lab.plot.policies
Cost, held_out    milliseconds from misses, fitted and checked on a record     lab.plot.cost_check
speeds            what `moe-lab calibrate` measured here, for Cost.fit
bounds, what_if   what a step would take at best, or with better hardware      lab.plot.bounds, lab.plot.what_if

Hits and misses come from `lab.simulate`, so from the live cache's own bookkeeping. Nothing here draws or prints.
"""

from moe_lab.caching.controls import agreement, by_popularity, controls, previous_token, uniform
from moe_lab.caching.cost import Cost, held_out
from moe_lab.caching.curves import miss_ratio, stack_distance
from moe_lab.caching.machine import speeds
from moe_lab.caching.study import study
from moe_lab.caching.what_if import CHANGES, Change, bounds, what_if
from moe_lab.simulate.table import steps
from moe_lab.stream.policy import POLICIES, Fitted, make_policy, policy_of

__all__ = [
    "CHANGES",
    "POLICIES",
    "Change",
    "Cost",
    "Fitted",
    "agreement",
    "bounds",
    "by_popularity",
    "controls",
    "held_out",
    "make_policy",
    "miss_ratio",
    "policy_of",
    "previous_token",
    "speeds",
    "stack_distance",
    "steps",
    "study",
    "uniform",
    "what_if",
]


def __dir__() -> list[str]:
    return sorted(__all__)
