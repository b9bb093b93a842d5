"""What an MoE layer is, as data: the router's settings and the layer's.

One canonical pipeline serves every family; a family is a setting of it (`families.py`), never a branch on a name.
This module knows nothing about files, weights or devices.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from moe_lab.checks import wants, wants_number, wants_whole
from moe_lab.errors import LabError, LabTypeError

Score = Literal["softmax", "sigmoid", "sqrt_softplus", "none"]
WeightsFrom = Literal["score", "softmax_topk", "sigmoid_topk", "sparsemixer"]
Activation = Literal["silu", "gelu_tanh", "relu2"]


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How logits [T, R] become K expert ids and weights a token (R = num_experts + zero_experts).

    Order of work: score -> + correction bias (selection only) -> group limit -> top-K (value descending, then id
    ascending) -> weights -> normalise -> scale. All of it in float64, rounded once to fp32.

    `normalize`: divide by the K weights' sum, guarded by `norm_eps` as `norm_kind` says ("add": sum + eps, "max":
    max(sum, eps)); a quotient by 0 is 0. So "max" with eps = 0 gives 0 for weights whose sum is negative, which scores
    "none" can have. `scale_on="output"`: the factor belongs to the routed sum, not to the weights. "sparsemixer" ranks
    the logits themselves: no groups, no correction bias, no hash table.

    LabTypeError for sizes that are no whole numbers, LabError for settings that cannot be or that give NaN.
    """

    num_experts: int
    top_k: int
    score: Score = "softmax"
    weights_from: WeightsFrom = "score"
    normalize: bool = False
    norm_eps: float = 0.0
    norm_kind: Literal["add", "max"] = "add"
    scale: float = 1.0
    scale_on: Literal["weights", "output"] = "weights"
    n_group: int = 1
    topk_group: int = 1
    group_score: Literal["top2_sum", "max"] = "top2_sum"
    group_fill: float = -math.inf
    zero_experts: int = 0
    hash_routing: bool = False
    temperature: float = 1.0
    softcap: float | None = None
    jitter_eps: float = 0.01

    @property
    def width(self) -> int:
        """R, the number of scores a token gets: real experts plus zero-computation experts."""
        return self.num_experts + self.zero_experts

    def __post_init__(self) -> None:
        _one_of(
            "RouterSpec",
            {
                "score": (self.score, ("softmax", "sigmoid", "sqrt_softplus", "none")),
                "weights_from": (self.weights_from, ("score", "softmax_topk", "sigmoid_topk", "sparsemixer")),
                "norm_kind": (self.norm_kind, ("add", "max")),
                "scale_on": (self.scale_on, ("weights", "output")),
                "group_score": (self.group_score, ("top2_sum", "max")),
            },
        )
        for name in ("num_experts", "top_k", "n_group", "topk_group", "zero_experts"):
            object.__setattr__(self, name, wants_whole(f"RouterSpec.{name}", getattr(self, name)))
        if self.num_experts < 1 or self.zero_experts < 0:
            raise LabError(
                f"RouterSpec has E={self.num_experts} experts and Z={self.zero_experts} zero experts; "
                "wanted E >= 1, Z >= 0."
            )
        if not 1 <= self.top_k <= self.width:
            raise LabError(
                f"K={self.top_k} experts per token, but the router scores R={self.width}: wanted 1 <= K <= R. "
                "Lower K or load a wider router."
            )
        self._check_groups()
        if self.weights_from == "sparsemixer":
            self._check_sparsemixer()
        self._check_numbers()

    def _check_sparsemixer(self) -> None:
        if self.top_k != 2:
            raise LabError(f"weights_from='sparsemixer' picks exactly K=2 experts, got K={self.top_k}.")
        if self.n_group > 1 or self.hash_routing:
            other = f"n_group={self.n_group}" if self.n_group > 1 else "hash_routing=True"
            raise LabError(f"weights_from='sparsemixer' ranks the logits themselves, so {other} would do nothing.")

    def _check_numbers(self) -> None:
        checks: tuple[tuple[str, Callable[[float], bool], str], ...] = (
            ("norm_eps", lambda v: 0 <= v < math.inf, ">= 0 and finite"),
            ("scale", math.isfinite, "finite"),
            ("temperature", lambda v: 0 < v < math.inf, "> 0 and finite"),
            ("softcap", lambda v: 0 < v < math.inf, "> 0 and finite, or None for no cap"),
            ("jitter_eps", lambda v: 0 <= v < math.inf, ">= 0 and finite"),
            ("group_fill", lambda v: v < math.inf, "finite or -inf"),
        )
        for name, fits, wanted in checks:
            if name == "softcap" and self.softcap is None:
                continue
            value = getattr(self, name)
            wants_number(f"RouterSpec.{name}", value)
            if not fits(value):
                raise LabError(f"RouterSpec.{name} is {value}; it must be {wanted}.")

    def _check_groups(self) -> None:
        g, keep, r = self.n_group, self.topk_group, self.width
        if g < 1 or r % g:
            raise LabError(f"n_group={g} does not divide the router width R={r}.")
        if not 1 <= keep <= g:
            raise LabError(f"topk_group={keep} of n_group={g} groups: wanted 1 <= topk_group <= n_group.")
        if g == 1:
            return
        if self.group_score == "top2_sum" and r // g < 2:
            raise LabError(
                f"group_score='top2_sum' needs two experts a group, but R={r} in n_group={g} groups leaves {r // g}."
            )
        if self.top_k > keep * (r // g):
            raise LabError(
                f"K={self.top_k} picks, but topk_group={keep} groups of {r // g} hold only {keep * (r // g)} experts."
            )


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """An expert every token visits; it computes by the layer's own formula, with a clamp of its own.

    `gated`: its output is scaled by sigmoid(x . w_gate). `combine`: "sum" adds it to the routed sum, "average" halves
    that total. `limit`: as MoESpec.limit, for this expert alone (None: no clamp, whatever the routed experts do).
    """

    d_expert: int
    gated: bool = False
    combine: Literal["sum", "average"] = "sum"
    limit: float | None = None

    def __post_init__(self) -> None:
        _one_of("SharedSpec", {"combine": (self.combine, ("sum", "average"))})
        wants_whole("SharedSpec.d_expert", self.d_expert)
        if self.d_expert < 1:
            raise LabError(f"SharedSpec.d_expert is {self.d_expert}; it must be at least 1.")
        _check_limit("SharedSpec", self.limit)


@dataclass(frozen=True, slots=True)
class MoESpec:
    """One MoE layer's shape and formulas. D = d_model, F = d_expert, E and K come from `router`.

    An expert: h = act(gate) * up, or act(up) where it is not `gated`; then down. `limit` L clamps as `limit_mode` says:
    "before" g to at most L and u to -L..L, then act(g) u; "after" min(act(g), L) clip(u); "oai" clamps as "before" and
    computes g sigmoid(alpha g) (u + 1). `expert_bias`: gate, up and down have one, down's inside the weighted sum.
    `weight_place`: the router's weight multiplies each expert's "output", its "input", or the "hidden" before down.
    `latent`: the experts' own width; x is projected to it before them and the weighted sum back after.
    `router_input`: "normed" scores rms_norm(x) * scale * D^-1/2 instead of the rows themselves.
    `family`: its name in tables (a Family object counts as its name).
    `feed_forward`: "normed_residual" takes the residual stream and does the decoder layer's whole feed-forward half:
    out = (x + norm(norm(shared(norm(x))) + norm(experts(norm(x))))) * layer_scalar, with `norm_eps`.
    """

    router: RouterSpec
    d_model: int
    d_expert: int
    activation: Activation = "silu"
    limit: float | None = None
    limit_mode: Literal["before", "after", "oai"] = "before"
    alpha: float = 1.702
    weight_place: Literal["output", "input", "hidden"] = "output"
    router_bias: bool = False
    shared: SharedSpec | None = None
    family: str = "custom"
    gated: bool = True
    expert_bias: bool = False
    correction_bias: bool = False
    per_expert_scale: bool = False
    latent: int | None = None
    router_input: Literal["rows", "normed"] = "rows"
    feed_forward: Literal["experts", "normed_residual"] = "experts"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "family", _family_name(self.family))
        _one_of(
            "MoESpec",
            {
                "activation": (self.activation, ("silu", "gelu_tanh", "relu2")),
                "limit_mode": (self.limit_mode, ("before", "after", "oai")),
                "weight_place": (self.weight_place, ("output", "input", "hidden")),
                "router_input": (self.router_input, ("rows", "normed")),
                "feed_forward": (self.feed_forward, ("experts", "normed_residual")),
            },
        )
        wants("MoESpec.router", self.router, RouterSpec, "a RouterSpec")
        for name in ("d_model", "d_expert", *(("latent",) if self.latent is not None else ())):
            wants_whole(f"MoESpec.{name}", getattr(self, name))
        if self.d_model < 1 or self.d_expert < 1 or (self.latent is not None and self.latent < 1):
            raise LabError(f"MoESpec has D={self.d_model}, F={self.d_expert}, latent={self.latent}; wanted at least 1.")
        _check_limit("MoESpec", self.limit)
        self._check_combinations()

    def _check_combinations(self) -> None:
        oai = self.limit_mode == "oai"
        for wrong, why in (
            (oai and not (self.gated and self.activation == "silu"), "limit_mode='oai' is a form of gated silu"),
            (not self.gated and self.limit is not None, "a limit clamps gate and up, but these experts have no gate"),
            (self.expert_bias and self.weight_place != "output", "a down bias is weighed on the output only"),
            (self.latent and self.router.zero_experts, "zero experts give x back, which a latent width cannot hold"),
            (self.feed_forward == "normed_residual" and self.shared is None, "'normed_residual' adds a shared branch"),
            (
                self.correction_bias and self.router.weights_from == "sparsemixer",
                "'sparsemixer' ranks the logits themselves, so a correction bias would do nothing",
            ),
        ):
            if wrong:
                raise LabError(f"MoESpec cannot be: {why}.")

    @property
    def num_experts(self) -> int:
        """E, the number of real experts."""
        return self.router.num_experts

    @property
    def top_k(self) -> int:
        """K, picks per token."""
        return self.router.top_k

    @property
    def d_routed(self) -> int:
        """The width of the rows that experts read and write: D, or the latent width."""
        return self.latent or self.d_model


def differences(ours: MoESpec, theirs: MoESpec, *, rel: float = 0.0) -> list[tuple[str, Any, Any]]:
    """(name, ours, theirs) of every setting that differs, such as ("router.scale", 2.0, 1.0), ("layer.limit", ...).
    Fractions within `rel` of each other are equal: files keep them in fp32 or as text."""
    found: list[tuple[str, Any, Any]] = []
    pairs: list[tuple[str, Any, Any]] = [("router", ours.router, theirs.router), ("layer", ours, theirs)]
    if ours.shared is not None and theirs.shared is not None:
        pairs.append(("shared", ours.shared, theirs.shared))
    skipped = {"router", *(("shared",) if len(pairs) > 2 else ())}
    for record, one, two in pairs:
        for name in (f.name for f in fields(one) if f.name not in skipped):
            a, b = getattr(one, name), getattr(two, name)
            if a != b and not (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=rel)):
                found.append((f"{record}.{name}", a, b))
    return found


def _family_name(family: object) -> str:
    """A family's name, whether the name or the Family itself was given."""
    name = family if isinstance(family, str) else getattr(family, "name", None)
    if not isinstance(name, str):
        raise LabTypeError(f"MoESpec.family is a {type(family).__name__}; wanted a name or a moe_lab.families.Family.")
    return name


def _one_of(what: str, fields: dict[str, tuple[str, tuple[str, ...]]]) -> None:
    for name, (value, allowed) in fields.items():
        if value not in allowed:
            raise LabError(f"{what}.{name} is {value!r}; it must be one of {', '.join(allowed)}.")


def _check_limit(what: str, limit: float | None) -> None:
    if limit is not None and not 0 < limit < math.inf:
        raise LabError(f"{what}.limit is {limit}; it must be > 0 and finite, or None for no clamp.")
