"""`lab.explore`: controls over figures and text, alive in a kernel and still alive in an exported page."""

from moe_lab.explore.cache import cache, prefetch
from moe_lab.explore.explorer import MOST_FRAMES, Explorer
from moe_lab.explore.grid import GridExplorer
from moe_lab.explore.pair import PairExplorer
from moe_lab.explore.parity import parity
from moe_lab.explore.replay import buy, timeline
from moe_lab.explore.ribbon import Ribbon, ribbon
from moe_lab.explore.routing import load, routing

__all__ = [
    "MOST_FRAMES",
    "Explorer",
    "GridExplorer",
    "PairExplorer",
    "Ribbon",
    "buy",
    "cache",
    "load",
    "parity",
    "prefetch",
    "ribbon",
    "routing",
    "timeline",
]


def __dir__() -> list[str]:
    return sorted(__all__)
