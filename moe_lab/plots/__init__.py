"""`lab.plot`: tidy frames in, matplotlib Axes out.

Every function is `name(df, *, ax=None) -> Axes`, measures nothing, never calls `show()` and leaves rcParams alone.
Without `ax` it makes a figure that a notebook shows with alt text. Each title states what the frame says. The Axes
remember the frame: `save` writes picture, data and settings; `table` and `to_latex` show a frame as a table.
"""

from moe_lab.plots.batching import batching
from moe_lab.plots.bench import bench
from moe_lab.plots.cache import miss_ratio, policies, stack_distance
from moe_lab.plots.cost import bounds, cost_check, what_if
from moe_lab.plots.cost_curves import cost, parts
from moe_lab.plots.parity import parity
from moe_lab.plots.parity_causes import attribution, error_map
from moe_lab.plots.phases import phases
from moe_lab.plots.replay import replay, waterfall
from moe_lab.plots.routing import load
from moe_lab.plots.routing_curves import next_layer, reuse, union
from moe_lab.plots.routing_flips import flips
from moe_lab.plots.routing_pairs import coactivation
from moe_lab.plots.routing_skew import skew
from moe_lab.plots.runs import runs
from moe_lab.plots.save import save
from moe_lab.plots.style import describe, png, style
from moe_lab.plots.table import Table, table, to_latex
from moe_lab.plots.timeline import timeline
from moe_lab.plots.waits import prefetch, stalls, wait_ecdf

__all__ = [
    "Table",
    "attribution",
    "batching",
    "bench",
    "bounds",
    "coactivation",
    "cost",
    "cost_check",
    "describe",
    "error_map",
    "flips",
    "load",
    "miss_ratio",
    "next_layer",
    "parity",
    "parts",
    "phases",
    "png",
    "policies",
    "prefetch",
    "replay",
    "reuse",
    "runs",
    "save",
    "skew",
    "stack_distance",
    "stalls",
    "style",
    "table",
    "timeline",
    "to_latex",
    "union",
    "wait_ecdf",
    "waterfall",
    "what_if",
]


def __dir__() -> list[str]:
    return sorted(__all__)
