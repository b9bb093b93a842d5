"""What an MoE layer is, as data: the router's settings and the layer's.

One canonical pipeline serves every family; a family is a setting of it (`families.py`), never a branch on a name.
This module knows nothing about files, weights or devices.
"""

import math
from dataclasses import dataclass
from typing import Literal

from moe_lab.errors import LabError

Score = Literal["softmax", "sigmoid", "sqrt_softplus", "none"]
WeightsFrom = Literal["score", "softmax_topk", "sigmoid_topk", "sparsemixer"]
Activation = Literal["silu", "gelu_tanh", "relu2"]


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How logits [T, R] become K expert ids and weights a token (R = num_experts + zero_experts).

    Order of work: score -> + correction bias (selection only) -> group limit -> top-K (value descending, then id
    ascending) -> weights -> normalise -> scale. All of it in float64, rounded once to fp32.

    `normalize`: divide by the K weights' sum, guarded by `norm_eps` as `norm_kind` says ("add": sum + eps, "max":
    max(sum, eps)). `scale_on="output"`: the factor belongs to the routed sum, not to the weights.
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
        for name, value, allowed in (
            ("score", self.score, ("softmax", "sigmoid", "sqrt_softplus", "none")),
            ("weights_from", self.weights_from, ("score", "softmax_topk", "sigmoid_topk", "sparsemixer")),
            ("norm_kind", self.norm_kind, ("add", "max")),
            ("scale_on", self.scale_on, ("weights", "output")),
            ("group_score", self.group_score, ("top2_sum", "max")),
        ):
            if value not in allowed:
                raise LabError(f"RouterSpec.{name} is {value!r}; it must be one of {', '.join(allowed)}.")
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
        if self.weights_from == "sparsemixer" and self.top_k != 2:
            raise LabError(f"weights_from='sparsemixer' picks exactly K=2 experts, got K={self.top_k}.")
        if not self.temperature > 0:
            raise LabError(f"RouterSpec.temperature is {self.temperature}; it must be > 0.")
        if self.softcap is not None and not self.softcap > 0:
            raise LabError(f"RouterSpec.softcap is {self.softcap}; it must be > 0, or None for no cap.")

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
    """An expert every token visits. `gated`: its output is scaled by sigmoid(x . w_gate)."""

    d_expert: int
    gated: bool = False


@dataclass(frozen=True, slots=True)
class MoESpec:
    """One MoE layer's shape and formulas. D = d_model, F = d_expert, E and K come from `router`.

    `activation`: h = act(gate) * up. `limit` clamps around it as `limit_mode` says; `alpha` is the OAI sigmoid factor.
    `weight_place`: where the router's weight multiplies ("output", "input" or "hidden", i.e. before down).
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

    def __post_init__(self) -> None:
        if self.d_model < 1 or self.d_expert < 1:
            raise LabError(f"MoESpec has D={self.d_model} and F={self.d_expert}; both must be at least 1.")

    @property
    def num_experts(self) -> int:
        """E, the number of real experts."""
        return self.router.num_experts

    @property
    def top_k(self) -> int:
        """K, picks per token."""
        return self.router.top_k
