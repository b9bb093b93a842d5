"""`lab.analysis`: one question about routing a function, each answered by a tidy DataFrame that `lab.plot` draws.

load, balance, skew       how evenly are tokens spread?                     lab.plot.load, lab.plot.skew
coactivation              which experts are picked together?                lab.plot.coactivation
reuse                     how soon is an expert picked again?               lab.plot.reuse
union                     how many experts do M successive tokens need?     lab.plot.union
next_layer                could the next layer's experts be read early?     lab.plot.next_layer
flips, router_flips, flip_rate   which tokens change experts with the router's precision?   lab.plot.flips

The first four take a RoutingTrace; the last two need recorded activations and refuse synthetic ones. Formulas, units
and controls stand in each module. Nothing here draws or prints.
"""

from moe_lab.analysis.coactivation import coactivation
from moe_lab.analysis.flips import ROUTER_VARIANTS, flip_rate, flips, router_flips
from moe_lab.analysis.load import balance, load, skew
from moe_lab.analysis.picks import occupancy, shuffled, tokens_of
from moe_lab.analysis.prediction import next_layer
from moe_lab.analysis.reuse import reuse
from moe_lab.analysis.scores import layer_logits
from moe_lab.analysis.union import union

__all__ = [
    "ROUTER_VARIANTS",
    "balance",
    "coactivation",
    "flip_rate",
    "flips",
    "layer_logits",
    "load",
    "next_layer",
    "occupancy",
    "reuse",
    "router_flips",
    "shuffled",
    "skew",
    "tokens_of",
    "union",
]


def __dir__() -> list[str]:
    return sorted(__all__)
