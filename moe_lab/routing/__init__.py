"""From router logits to picks, and from picks to per-expert groups.

`picks`: what comes out. `router`: logits to picks, with its arithmetic in `scores`. `grouping`: picks to groups.
`checks` and `backend`: what is refused, and who computes. None of them knows the experts' weights.
"""

from moe_lab.routing.backend import BackendChoice
from moe_lab.routing.checks import check_picks
from moe_lab.routing.grouping import plan, route_plan
from moe_lab.routing.picks import ExpertPlan, Routing
from moe_lab.routing.router import choice_margin, flagged_picks, route

__all__ = [
    "BackendChoice", "ExpertPlan", "Routing", "check_picks", "choice_margin", "flagged_picks", "plan", "route",
    "route_plan",
]  # fmt: skip
