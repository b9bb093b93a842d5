"""A small language model of plain torch whose MoE blocks have a known family's names: no transformers needed."""

from typing import Any

import torch
from torch import nn

D, F, E, K, V = 16, 8, 6, 2, 50


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top_k = K
        self.weight = nn.Parameter(torch.randn(E, D))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(0.2 * torch.randn(E, 2 * F, D))
        self.down_proj = nn.Parameter(0.2 * torch.randn(E, D, F))
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("td,efd->tef", x, self.gate_up_proj).chunk(2, -1)
        down = torch.einsum("tef,edf->ted", self.act_fn(gate) * up, self.down_proj)
        picked = down.gather(1, ids[..., None].expand(-1, -1, D))
        return (picked * weights[..., None]).sum(1)


class MixtralSparseMoeBlock(nn.Module):
    """The family is known by this name."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = Gate(), Experts()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.reshape(-1, D)
        weights, ids = (x @ self.gate.weight.T).softmax(-1).topk(K)
        return self.experts(x, ids, weights / weights.sum(-1, keepdim=True)).reshape(hidden_states.shape)


class Layer(nn.Module):
    def __init__(self, block: nn.Module | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.mlp = nn.Linear(D, D) if block is None else block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class ToyModel(nn.Module):
    """Layers 1 and 2 of three are MoE. `order` keeps the token ids of each run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.layers = nn.ModuleList([Layer(None), Layer(MixtralSparseMoeBlock()), Layer(MixtralSparseMoeBlock())])
        self.order: list[list[int]] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        assert not self.training
        self.order.append(ids[0].tolist())
        x: Any = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def toy_model() -> ToyModel:
    """The model with weights of seed 0, in training mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ToyModel().train()
