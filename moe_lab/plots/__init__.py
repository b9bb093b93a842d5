"""`lab.plot`: tidy frames in, matplotlib Axes out.

Every function is `name(df, *, ax=None) -> Axes`, measures nothing, never calls `show()` and leaves rcParams alone.
Without `ax` it makes a figure that a notebook shows with alt text. Each title states what the frame says.
"""

from moe_lab.plots.batching import batching
from moe_lab.plots.parity import parity
from moe_lab.plots.phases import phases
from moe_lab.plots.routing import load
from moe_lab.plots.style import describe, png, style

__all__ = ["batching", "describe", "load", "parity", "phases", "png", "style"]
