"""From picks to per-expert groups: `plan` sorts the (token, slot) pairs by expert, stably."""

from moe_lab._types import Float, Int, Tensor
from moe_lab.checks import wants, wants_whole
from moe_lab.routing.backend import BackendChoice, takes_kernel
from moe_lab.routing.checks import check_picks, check_route
from moe_lab.routing.picks import ExpertPlan, Routing
from moe_lab.routing.router import route, rows_flagged
from moe_lab.spec import RouterSpec
from moe_lab_kernels.route import plan as plan_kernel
from moe_lab_kernels.route import route_plan as route_plan_kernel

MOST_EXPERTS = 1 << 16
"""More than any model has: a mistaken count must not become an allocation of gigabytes."""


def plan(routing: Routing, num_experts: int, *, backend: BackendChoice = "auto") -> ExpertPlan:
    """Group the pairs of `routing` by expert. -1 and zero-computation experts (E <= id < R) are left out.

    On CPU any other id raises LabError naming the token; on the device it is left out and counted in `.invalid`,
    without a look from the host. LabError for another E than the router's that picked. `backend` as in `route`.
    """
    wants("routing", routing, Routing, "a lab.Routing: lab.route makes one, lab.Routing(ids, weights) wraps your own")
    num_experts = wants_whole("num_experts", num_experts, 1, MOST_EXPERTS)
    width = check_picks(routing, num_experts)
    ids, weights = routing.ids, routing.weights
    why = f"E={num_experts}" if num_experts > plan_kernel.MOST_EXPERTS else None
    kernel = takes_kernel(backend, why, weights)
    return ExpertPlan(*(plan_kernel.plan if kernel else plan_kernel.plan_ref)(ids, weights, num_experts, width))


def route_plan(
    logits: Float[Tensor, "T R"],
    spec: RouterSpec,
    *,
    correction_bias: Float[Tensor, " R"] | None = None,
    hash_table: Int[Tensor, "V K"] | None = None,
    token_ids: Int[Tensor, " T"] | None = None,
    per_expert_scale: Float[Tensor, " E"] | None = None,
    backend: BackendChoice = "auto",
) -> tuple[Routing, ExpertPlan]:
    """`route`, then `plan` of its picks; in one launch for up to 8 tokens where the kernel serves. Same bits."""
    vectors = {"correction_bias": correction_bias, "per_expert_scale": per_expert_scale}
    check_route(logits, spec, correction_bias, hash_table, token_ids, per_expert_scale)
    why = route_plan_kernel.unserved(logits, spec)
    if why or not takes_kernel(backend, why, logits, **vectors):
        table = {"hash_table": hash_table, "token_ids": token_ids}
        routing = route(logits, spec, **table, **vectors, backend=backend)  # pyright: ignore[reportArgumentType]
        return routing, plan(routing, spec.num_experts, backend=backend)
    ids, weights, affected, groups = route_plan_kernel.route_plan(logits, spec, **vectors)
    routing = Routing(ids, weights, rows_flagged(affected), spec.width, spec.num_experts)
    return routing, ExpertPlan(*groups)
