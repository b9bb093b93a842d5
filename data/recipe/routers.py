"""Routers under observation while training: fp32 scores, a balance loss for each layer, its weight under control.

T tokens of a step, E experts, K experts per token. The balance loss of one layer is E * sum_e f_e * P_e (Switch
Transformer, arXiv 2101.03961, eq. 4-6): f_e is the part of the step's T*K assignments that expert e received, P_e its
mean router probability; 1.0 is perfect balance. It is taken over the whole step (global batch), never over one
sequence: a sequence has one domain, and balancing inside it would forbid the specialisation that expert caches live
on.

transformers' own loss pools all layers before the product, so layers may starve experts as long as they starve
different ones: a probe run with it at 0.01 left experts with 0.00-0.04 % of the assignments in four of six layers.
Here each layer has its own weight, steered to a floor: enough balance that no expert starves, no more, because
balance costs skew.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class RouterTap:
    """What one router saw and said in the last forward pass. x [T, D] fp32, logits [T, E] fp32, ids [T, K]."""

    gate: Any
    x: Tensor | None = None
    logits: Tensor | None = None
    ids: Tensor | None = None

    def observed(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.x is None or self.logits is None or self.ids is None:
            raise RuntimeError("router tap read before the model ran")
        return self.x, self.logits, self.ids

    def counts(self, experts: int) -> Tensor:
        """Assignments per expert, int64 [E], without a synchronisation of the device."""
        _, _, ids = self.observed()
        return (ids.reshape(-1, 1) == torch.arange(experts, device=ids.device)).sum(0)


def tap_routers(model: Any) -> list[RouterTap]:
    """Wrap every layer's router: it computes in fp32 whatever autocast says and leaves what it saw and said in a tap.

    Why fp32: bf16 logits have 8 significant bits, so the fourth and fifth expert tie often and the choice made while
    training would not be the choice made by the fp32 router of the shipped file.
    """
    return [_tap(layer.mlp.gate) for layer in model.model.layers]


def _tap(gate: Any) -> RouterTap:
    tap, inner = RouterTap(gate), gate.forward

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            logits, weights, ids = inner(x.float())
        tap.x, tap.logits, tap.ids = x, logits, ids
        return logits, weights, ids

    gate.forward = forward
    return tap


def balance_loss(tap: RouterTap) -> Tensor:
    """E * sum_e f_e * P_e of one layer over the whole step; 1.0 when all experts get the same."""
    _, logits, ids = tap.observed()
    experts = logits.shape[-1]
    share = tap.counts(experts).float() / ids.numel()
    return experts * (share * logits.softmax(-1).mean(0)).sum()


@torch.no_grad()
def lookahead_recall(this: RouterTap, following: RouterTap) -> Tensor:
    """Part of the next layer's K experts that its router already names on this layer's x (recall@K), 0-d."""
    x, _, _ = this.observed()
    _, _, ids = following.observed()
    early = F.linear(x.float(), following.gate.weight.float()).topk(ids.shape[-1], dim=-1).indices
    return (ids.unsqueeze(-1) == early.unsqueeze(-2)).any(-1).float().mean()


@dataclass
class BalanceControl:
    """One balance weight a layer, steered so that the least used expert keeps a share between `low` and `high`."""

    layers: int
    start: float
    low: float = 0.009
    high: float = 0.015
    floor: float = 0.004
    cap: float = 0.1
    weights: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = [self.start] * self.layers

    def update(self, min_share: list[float]) -> None:
        for layer, share in enumerate(min_share):
            factor = 1.5 if share < self.low else 0.8 if share > self.high else 1.0
            self.weights[layer] = min(self.cap, max(self.floor, self.weights[layer] * factor))
