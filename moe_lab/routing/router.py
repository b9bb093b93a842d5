"""From router logits to picks.

T tokens, R scores a token (E experts + zero-computation experts), K picks. `route` is the torch reference of the whole
pipeline (its arithmetic is in `routing.scores`), or one kernel launch with the same bits. Knows nothing of groups.
"""

import torch

from moe_lab._types import Float, Float32, Int, Tensor
from moe_lab.routing.backend import BackendChoice, takes_kernel
from moe_lab.routing.checks import check_logits, check_route, refuse_affected
from moe_lab.routing.picks import Routing
from moe_lab.routing.scores import (
    conditioned,
    hashed,
    normalised,
    ranked_by,
    score_of,
    sparsemixer,
    top_ids,
    weights_of,
)
from moe_lab.spec import RouterSpec
from moe_lab_kernels.route import topk as topk_kernel
from moe_lab_kernels.route.router_settings import unserved


def route(
    logits: Float[Tensor, "T R"],
    spec: RouterSpec,
    *,
    correction_bias: Float[Tensor, " R"] | None = None,
    hash_table: Int[Tensor, "V K"] | None = None,
    token_ids: Int[Tensor, " T"] | None = None,
    per_expert_scale: Float[Tensor, " E"] | None = None,
    checked: bool = False,
    backend: BackendChoice = "auto",
) -> Routing:
    """Pick K experts a token and weigh them, as `spec` says.

    A NaN logit counts as -inf and weighs 0; 0/0 in the normalisation is 0; +inf takes the whole softmax. `checked`
    raises LabError naming the first row with a NaN or +inf instead. LabError for widths that disagree. `backend`
    "auto": one kernel launch on CUDA and in the interpreter, for routers and dtypes it serves, else torch; same bits.
    """
    check_route(logits, spec, correction_bias, hash_table, token_ids, per_expert_scale)
    vectors = {"correction_bias": correction_bias, "per_expert_scale": per_expert_scale}
    if takes_kernel(backend, unserved(spec), logits, **vectors):
        ids, weights, affected = topk_kernel.topk(logits, spec, **vectors)
        if checked:
            refuse_affected(affected > 0)
        return Routing(ids, weights, rows_flagged(affected), spec.width, spec.num_experts)
    z, nan = conditioned(logits, spec)
    bad = (nan | (logits == float("inf"))).any(-1)
    if checked:
        refuse_affected(bad)
    if spec.weights_from == "sparsemixer":
        ids, w = sparsemixer(z, spec.jitter_eps)
    else:
        s = score_of(z, spec.score).masked_fill(nan, 0.0)
        if spec.hash_routing:
            assert hash_table is not None
            assert token_ids is not None
            ids, unknown = hashed(hash_table.to(z.device), token_ids.to(z.device), spec.width)
            bad = bad | unknown
        else:
            ids = top_ids(ranked_by(z if spec.score == "none" else s, nan, spec, correction_bias), spec.top_k)
        w = weights_of(z, s, ids.clamp(min=0), spec).masked_fill(ids < 0, 0.0)
    w = normalised(w, spec)
    if spec.scale_on == "weights":
        w = w * spec.scale
    if per_expert_scale is not None:
        known = ids < spec.num_experts
        w = torch.where(known, w * per_expert_scale.double()[ids.clamp(0, spec.num_experts - 1)], w)
    return Routing(ids.to(torch.int32), w.float(), bad.sum().to(torch.int32), spec.width, spec.num_experts)


def choice_margin(
    logits: Float[Tensor, "T R"], spec: RouterSpec, *, correction_bias: Float[Tensor, " R"] | None = None
) -> Float32[Tensor, " T"]:
    """How close each token came to other picks: K-th minus (K+1)-th choice score, float64 rounded once to fp32.

    The choice score is what `route` ranks by: the score (the logit where there is none) plus the correction bias,
    within the kept groups. 0 is a tie, which the lower id wins; inf where no further expert could be picked; NaN for
    hash routing, which ranks nothing. LabError for widths that disagree.
    """
    check_logits(logits, spec)
    if spec.hash_routing:
        return torch.full((len(logits),), float("nan"), device=logits.device)
    check_route(logits, spec, correction_bias, None, None, None)
    z, nan = conditioned(logits, spec)
    if spec.top_k == spec.width:
        return torch.full((len(logits),), float("inf"), device=logits.device)
    if spec.weights_from == "sparsemixer":
        choice = z
    else:
        score = z if spec.score == "none" else score_of(z, spec.score).masked_fill(nan, 0.0)
        choice = ranked_by(score, nan, spec, correction_bias)
    ranked = torch.sort(choice, -1, descending=True).values
    last, next_one = ranked[:, spec.top_k - 1], ranked[:, spec.top_k]
    return torch.where(last == next_one, 0.0, last - next_one).float()  # two infinities tie


def flagged_picks(logits: Tensor, spec: RouterSpec, **vectors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """ids int32 [T, K], weights fp32 [T, K], and which rows held a NaN or +inf: int32 [T] flags or their count 0-d.
    `vectors`: those of `route`, which this is without the sum over the flags that costs a launch."""
    own = {name: vectors.get(name) for name in ("correction_bias", "per_expert_scale")}
    if takes_kernel("auto", unserved(spec), logits, **own):
        asked = (vectors.get(name) for name in ("correction_bias", "hash_table", "token_ids", "per_expert_scale"))
        check_route(logits, spec, *asked)
        return topk_kernel.topk(logits, spec, **own)
    routing = route(logits, spec, **vectors)  # pyright: ignore[reportArgumentType]
    assert routing.affected_rows is not None
    return routing.ids, routing.weights, routing.affected_rows


def rows_flagged(affected: Tensor) -> Tensor:
    """Rows flagged, int32 0-d; one row's flag is its count, which saves a decode step a launch."""
    return affected.view(()) if len(affected) == 1 else affected.sum(dtype=torch.int32)
