"""From router logits to picks, and from picks to per-expert groups.

T tokens, R scores a token (E experts + zero-computation experts), K picks. `route` is the torch reference of the whole
pipeline: scores, sums and norms in float64, rounded once to fp32, so that host and device agree. Selection is by value
descending, then id ascending, always. `plan` sorts the (token, slot) pairs by expert, stably. Neither knows weights.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from moe_lab._types import Float, Float32, Int, Tensor
from moe_lab.card import card
from moe_lab.checks import wants, wants_tensor, wants_whole
from moe_lab.errors import LabError, LabTypeError
from moe_lab.routing_checks import ID_DTYPES, check_logits, check_route
from moe_lab.spec import RouterSpec
from moe_lab_kernels.backend import backend_of
from moe_lab_kernels.checks import FLOATS
from moe_lab_kernels.route import plan as plan_kernel
from moe_lab_kernels.route import route_plan as route_plan_kernel
from moe_lab_kernels.route import topk as topk_kernel
from moe_lab_kernels.route.router_settings import unserved

BackendChoice = Literal["auto", "torch", "triton"]
MOST_EXPERTS = 1 << 16
"""More than any model has: a mistaken count must not become an allocation of gigabytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Picks of T tokens: `ids` int32 [T, K], `weights` fp32 [T, K]; slot k is the router's rank k.

    `affected_rows` int32 0-d, on the ids' device: rows whose logits held a NaN or +inf. `width` is R and `num_experts`
    E where they are known (`route` says both): ids in E..R-1 are zero-computation experts; -1 is a skipped slot.
    LabTypeError for other dtypes, LabError for other shapes.
    """

    ids: Tensor
    weights: Tensor
    affected_rows: Tensor | None = None
    width: int | None = None
    num_experts: int | None = None

    def __post_init__(self) -> None:
        wants_tensor("Routing.ids", self.ids)
        wants_tensor("Routing.weights", self.weights)
        if self.ids.dtype not in ID_DTYPES:
            raise LabTypeError(f"Routing.ids are int32 or int64, got {self.ids.dtype}.")
        if not self.weights.is_floating_point():
            raise LabTypeError(f"Routing.weights are floating point, got {self.weights.dtype}.")
        if self.ids.ndim != 2 or self.ids.shape != self.weights.shape:
            raise LabError(
                f"Routing wants ids and weights [T, K], got {tuple(self.ids.shape)} and {tuple(self.weights.shape)}."
            )
        if self.ids.device != self.weights.device:
            raise LabError(f"Routing.ids live on {self.ids.device} but the weights on {self.weights.device}.")
        if self.ids.dtype == torch.int64 and bool((self.ids != self.ids.to(torch.int32)).any()):
            raise LabError("Routing.ids hold values beyond 32 bits.")
        object.__setattr__(self, "ids", self.ids.to(torch.int32).contiguous())
        object.__setattr__(self, "weights", self.weights.float().contiguous())
        if self.affected_rows is None:
            object.__setattr__(self, "affected_rows", torch.zeros((), dtype=torch.int32, device=self.ids.device))

    @property
    def tokens(self) -> int:
        """T."""
        return self.ids.shape[0]

    @property
    def top_k(self) -> int:
        """K."""
        return self.ids.shape[1]

    def _repr_html_(self) -> str:
        facts = {"tokens, T": self.tokens, "experts a token, K": self.top_k, "router width, R": self.width}
        return card("Routing", {**facts, "device": self.ids.device})


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPlan:
    """(token, slot) pairs sorted by expert, stable in (token, slot).

    counts int32 [E]; offsets int32 [E + 1]; token, slot int32 and weight fp32 [T*K]: pair p of expert e stands at
    offsets[e] <= p < offsets[e + 1]; entries past offsets[E] are undefined. `invalid` int32 0-d counts ids that are
    neither an expert, a zero expert nor -1 (possible on the device only; the host raises).
    """

    counts: Tensor
    offsets: Tensor
    token: Tensor
    slot: Tensor
    weight: Tensor
    invalid: Tensor


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
    if _takes_kernel(backend, unserved(spec), logits, **vectors):
        ids, weights, affected = topk_kernel.topk(logits, spec, **vectors)
        if checked:
            _refuse_affected(affected > 0)
        return Routing(ids, weights, _count(affected), spec.width, spec.num_experts)
    z, nan = _conditioned(logits, spec)
    bad = (nan | (logits == float("inf"))).any(-1)
    if checked:
        _refuse_affected(bad)
    if spec.weights_from == "sparsemixer":
        ids, w = _sparsemixer(z, spec.jitter_eps)
    else:
        s = _score(z, spec.score).masked_fill(nan, 0.0)
        if spec.hash_routing:
            assert hash_table is not None
            assert token_ids is not None
            ids, unknown = _hashed(hash_table.to(z.device), token_ids.to(z.device), spec.width)
            bad = bad | unknown
        else:
            ids = top_ids(_choice(z if spec.score == "none" else s, nan, spec, correction_bias), spec.top_k)
        w = _weights(z, s, ids.clamp(min=0), spec).masked_fill(ids < 0, 0.0)
    w = _normalise(w, spec)
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
    z, nan = _conditioned(logits, spec)
    if spec.top_k == spec.width:
        return torch.full((len(logits),), float("inf"), device=logits.device)
    if spec.weights_from == "sparsemixer":
        choice = z
    else:
        score = z if spec.score == "none" else _score(z, spec.score).masked_fill(nan, 0.0)
        choice = _choice(score, nan, spec, correction_bias)
    ranked = torch.sort(choice, -1, descending=True).values
    last, next_one = ranked[:, spec.top_k - 1], ranked[:, spec.top_k]
    return torch.where(last == next_one, 0.0, last - next_one).float()  # two infinities tie


def _conditioned(logits: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """Logits in float64 after temperature and softcap, -inf for NaN; and where the NaNs were."""
    raw = logits.double()
    nan = raw.isnan()
    z = raw.masked_fill(nan, float("-inf")) / spec.temperature
    if spec.softcap is not None:
        z = (spec.softcap * torch.tanh(z / spec.softcap)).masked_fill(nan, float("-inf"))
    return z, nan


def _takes_kernel(backend: BackendChoice, unserved: str | None, *tensors: Tensor, **optional: Tensor | None) -> bool:
    """Whether the kernel runs: always by name (it then says itself what it refuses), by "auto" where it serves."""
    if backend not in ("auto", "torch", "triton"):
        raise LabError(f"backend is {backend!r}; it must be 'auto', 'torch' or 'triton'.")
    if backend != "auto":
        return backend == "triton"
    given = [*tensors, *(t for t in optional.values() if t is not None)]
    return unserved is None and backend_of(given[0]) != "torch" and all(t.dtype in FLOATS for t in given)


def _refuse_affected(bad: Tensor) -> None:
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise LabError(f"row {row} of the logits holds NaN or +inf ({int(bad.sum())} of {len(bad)} rows do).")


def _count(affected: Tensor) -> Tensor:
    """Rows flagged, int32 0-d; one row's flag is its count, which saves a decode step a launch."""
    return affected.view(()) if len(affected) == 1 else affected.sum(dtype=torch.int32)


def _hashed(table: Tensor, token_ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """ids int64 [T, K] of each token's row of the table, and which rows are not all known. Nothing outside the table is
    read: a token outside it is skipped (-1 in every slot), and so is a slot whose expert is none."""
    known = (token_ids >= 0) & (token_ids < table.shape[0])
    ids = table.long()[torch.where(known, token_ids, 0).long()]
    real = known[:, None] & (ids >= 0) & (ids < width)
    return torch.where(real, ids, -1), ~real.all(-1)


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


def _score(z: Tensor, kind: str) -> Tensor:
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


def _choice(score: Tensor, nan: Tensor, spec: RouterSpec, bias: Tensor | None) -> Tensor:
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


def _weights(z: Tensor, s: Tensor, ids: Tensor, spec: RouterSpec) -> Tensor:
    if spec.weights_from == "score":
        return s.gather(-1, ids)
    picked = z.gather(-1, ids)
    if spec.weights_from == "softmax_topk":
        return softmax64(picked)
    return torch.sigmoid(picked)


def _normalise(w: Tensor, spec: RouterSpec) -> Tensor:
    if not spec.normalize:
        return w
    # +inf takes the whole, as in a softmax; -inf has no share
    infinite = w == float("inf")
    w = torch.where(infinite.any(-1, keepdim=True), infinite.double(), w.masked_fill(w == float("-inf"), 0.0))
    total = w.sum(-1, keepdim=True)
    return safe_divide(w, total + spec.norm_eps if spec.norm_kind == "add" else total.clamp(min=spec.norm_eps))


def _sparsemixer(z: Tensor, eps: float) -> tuple[Tensor, Tensor]:
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
    kernel = _takes_kernel(backend, why, weights)
    return ExpertPlan(*(plan_kernel.plan if kernel else plan_kernel.plan_ref)(ids, weights, num_experts, width))


def check_picks(routing: Routing, num_experts: int) -> int:
    """The width that picks of `num_experts` experts have. LabError where the routing says another E (ids beyond it
    would be taken for zero-computation experts), and on a CPU, where the host may look, for an id that is none."""
    if routing.num_experts is not None and num_experts != routing.num_experts:
        raise LabError(
            f"num_experts={num_experts}, but these picks are of a router of E={routing.num_experts} experts."
        )
    if routing.width is not None and num_experts > routing.width:
        raise LabError(f"num_experts={num_experts}, but these picks are of a router of R={routing.width} scores.")
    width = max(num_experts, routing.width or num_experts)
    if not routing.ids.is_cuda:
        _refuse_invalid(routing.ids, width)
    return width


def _refuse_invalid(ids: Tensor, width: int) -> None:
    wrong = (ids < -1) | (ids >= width)
    if bool(wrong.any()):
        token, slot = (int(v) for v in wrong.nonzero()[0])
        raise LabError(f"routing.ids[{token}, {slot}] is {int(ids[token, slot])}; wanted -1 (skip) or 0..{width - 1}.")


def flagged_picks(logits: Tensor, spec: RouterSpec, **vectors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """ids int32 [T, K], weights fp32 [T, K], and which rows held a NaN or +inf: int32 [T] flags or their count 0-d.
    `vectors`: those of `route`, which this is without the sum over the flags that costs a launch."""
    own = {name: vectors.get(name) for name in ("correction_bias", "per_expert_scale")}
    if _takes_kernel("auto", unserved(spec), logits, **own):
        asked = (vectors.get(name) for name in ("correction_bias", "hash_table", "token_ids", "per_expert_scale"))
        check_route(logits, spec, *asked)
        return topk_kernel.topk(logits, spec, **own)
    routing = route(logits, spec, **vectors)  # pyright: ignore[reportArgumentType]
    assert routing.affected_rows is not None
    return routing.ids, routing.weights, routing.affected_rows


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
    if why or not _takes_kernel(backend, why, logits, **vectors):
        table = {"hash_table": hash_table, "token_ids": token_ids}
        routing = route(logits, spec, **table, **vectors, backend=backend)  # pyright: ignore[reportArgumentType]
        return routing, plan(routing, spec.num_experts, backend=backend)
    ids, weights, affected, groups = route_plan_kernel.route_plan(logits, spec, **vectors)
    routing = Routing(ids, weights, _count(affected), spec.width, spec.num_experts)
    return routing, ExpertPlan(*groups)
