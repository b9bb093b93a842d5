"""Replay a routing trace against a cache that holds no bytes: hits and misses of any policy at any capacity.

The bookkeeping is the live cache's own (`stream.slots` under the same policy objects), so on the same requests both
count the same, exactly. A request is what the engine asks for at once: the distinct experts of one layer for the tokens
of one step, cut into waves when they outnumber the slots. `requests` makes them from a trace, `bounds` holds the optima
that only a recorded trace can tell, `replay` runs one policy, `table` is the public face.
"""

from moe_lab.simulate.bounds import BELADY, BELADY_BYPASS, BOUNDS, INFINITE, Belady
from moe_lab.simulate.table import COLUMNS, STEP_COLUMNS, simulate, steps

__all__ = [
    "BELADY",
    "BELADY_BYPASS",
    "BOUNDS",
    "COLUMNS",
    "INFINITE",
    "STEP_COLUMNS",
    "Belady",
    "simulate",
    "steps",
]
