"""The arithmetic of routing in torch: scores, what experts are ranked by, and the weights of those picked.

float64 throughout, so that host and device agree once a result is rounded to fp32. z: conditioned logits [T, R];
s: their scores; a NaN logit counts as -inf and weighs 0. Selection is by value descending, then id ascending, always.
"""

import torch

from moe_lab._types import Tensor
from moe_lab.spec import RouterSpec


def conditioned(logits: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """Logits in float64 after temperature and softcap, -inf for NaN; and where the NaNs were."""
    raw = logits.double()
    nan = raw.isnan()
    z = raw.masked_fill(nan, float("-inf")) / spec.temperature
    if spec.softcap is not None:
        z = (spec.softcap * torch.tanh(z / spec.softcap)).masked_fill(nan, float("-inf"))
    return z, nan


def exp_or_0(x: Tensor) -> Tensor:
    """exp of float64 without subnormal results: those come out differently on every device, and are 0 in fp32."""
    return torch.where(x < -708.0, 0.0, torch.exp(x))


def softmax64(z: Tensor) -> Tensor:
    """Softmax over the last axis, total: +inf entries share the mass; a row of -inf gives zeros."""
    top = z.amax(-1, keepdim=True)
    infinite = top == float("inf")
    shifted = torch.where(torch.isinf(top), torch.zeros_like(z), z - top)
    e = torch.where(infinite, (z == float("inf")).double(), exp_or_0(shifted))
    e = torch.where(top == float("-inf"), torch.zeros_like(e), e)
    return safe_divide(e, e.sum(-1, keepdim=True))


def safe_divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b with 0/0 = 0."""
    return torch.where(b == 0, torch.zeros_like(a), a / torch.where(b == 0, torch.ones_like(b), b))


def score_of(z: Tensor, kind: str) -> Tensor:
    if kind == "softmax":
        return softmax64(z)
    if kind == "sigmoid":
        return torch.sigmoid(z)
    if kind == "sqrt_softplus":
        # log1p form: torch's softplus switches to the identity above its threshold
        return torch.sqrt(z.clamp(min=0) + torch.log1p(exp_or_0(-z.abs())))
    return z


def top_ids(values: Tensor, k: int) -> Tensor:
    """Ids of the k largest of the last axis: value descending, then id ascending (torch.topk promises no order)."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :k]


def ranked_by(score: Tensor, nan: Tensor, spec: RouterSpec, bias: Tensor | None) -> Tensor:
    """What the picks are ranked by: the score with its bias, -inf for a NaN logit, dropped groups filled."""
    c = score if bias is None else score + bias.double()
    c = c.masked_fill(nan | c.isnan(), float("-inf"))
    return _group_limit(c, spec) if spec.n_group > 1 else c


def _group_limit(c: Tensor, spec: RouterSpec) -> Tensor:
    groups = c.unflatten(-1, (spec.n_group, -1))
    if spec.group_score == "max":
        score = groups.amax(-1)
    else:
        score = torch.sort(groups, -1, descending=True).values[..., :2].sum(-1)
    keep = torch.zeros_like(score, dtype=torch.bool).scatter(-1, top_ids(score, spec.topk_group), True)
    return torch.where(keep.unsqueeze(-1), groups, torch.full_like(groups, spec.group_fill)).flatten(-2)


def weights_of(z: Tensor, s: Tensor, ids: Tensor, spec: RouterSpec) -> Tensor:
    if spec.weights_from == "score":
        return s.gather(-1, ids)
    picked = z.gather(-1, ids)
    if spec.weights_from == "softmax_topk":
        return softmax64(picked)
    return torch.sigmoid(picked)


def normalised(w: Tensor, spec: RouterSpec) -> Tensor:
    if not spec.normalize:
        return w
    # +inf takes the whole, as in a softmax; -inf has no share
    infinite = w == float("inf")
    w = torch.where(infinite.any(-1, keepdim=True), infinite.double(), w.masked_fill(w == float("-inf"), 0.0))
    total = w.sum(-1, keepdim=True)
    return safe_divide(w, total + spec.norm_eps if spec.norm_kind == "add" else total.clamp(min=spec.norm_eps))


def sparsemixer(z: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Two arg-max rounds (Phi-3.5): in each, experts far below the best are dropped before the softmax."""
    # One sort for both rounds: once the first pick is masked, a row of -inf elsewhere would offer it again.
    ids = top_ids(z, 2)
    rest, weights = z, []
    for best in ids.split(1, dim=-1):
        top = rest.gather(-1, best)
        dropped = (top - z) / torch.maximum(z.abs(), top) > 2 * eps
        weights.append(softmax64(rest.masked_fill(dropped, float("-inf"))).gather(-1, best))
        rest = rest.scatter(-1, best, float("-inf"))
    return ids, torch.cat(weights, -1)


def hashed(table: Tensor, token_ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """ids int64 [T, K] of each token's row of the table, and which rows are not all known. Nothing outside the table is
    read: a token outside it is skipped (-1 in every slot), and so is a slot whose expert is none."""
    known = (token_ids >= 0) & (token_ids < table.shape[0])
    ids = table.long()[torch.where(known, token_ids, 0).long()]
    real = known[:, None] & (ids >= 0) & (ids < width)
    return torch.where(real, ids, -1), ~real.all(-1)
