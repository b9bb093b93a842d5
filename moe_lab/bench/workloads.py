"""The fixed workloads of a benchmark: layer shapes, token counts, routings, and the fewest bytes a layer must move.

Axis letters: T tokens, D model width, F expert width, E experts, K experts a token. A workload is the layer from given
picks on: gate and up, activation, down, weighted sum. Knows nothing about kernels or clocks.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from moe_lab._types import Float32, Int32, Tensor
from moe_lab.errors import LabError

Popularity = Literal["uniform", "zipf"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One MoE layer's sizes."""

    name: str
    d_model: int
    d_expert: int
    experts: int
    top_k: int

    def shrunk(self, factor: int, most_experts: int = 32) -> "LayerShape":
        """A layer for a laptop, named after this one: widths divided by `factor`, at most `most_experts` experts.

        A width keeps what formats ask of it: whole blocks of 256, or an odd number of blocks of 32 where it had no
        whole blocks of 256 (2880, 704), so that the formats refused stay the same.
        """
        if factor < 1:
            raise LabError(f"a shape is shrunk by a factor of 1 or more, got {factor}.")
        if factor == 1:
            return self
        widths = {name: _narrower(getattr(self, name), factor) for name in ("d_model", "d_expert")}
        experts = min(self.experts, max(most_experts, 2 * self.top_k))
        return replace(self, name=f"{self.name} 1/{factor}", experts=experts, **widths)


def _narrower(width: int, factor: int) -> int:
    if width % 256 == 0:
        return 256 * max(1, round(width / 256 / factor))
    return 32 * (2 * round((width / 32 / factor - 1) / 2) + 1)


SHAPES = {
    s.name: s
    for s in (
        LayerShape("qwen3-30b-a3b", 2048, 768, 128, 8),
        LayerShape("mixtral-8x7b", 4096, 14336, 8, 2),
        LayerShape("deepseek-v3-like", 7168, 2048, 256, 8),
        LayerShape("v4.1-like", 5120, 2304, 384, 6),
        LayerShape("gpt-oss-120b-like", 2880, 2880, 128, 4),
        LayerShape("gemma4-26b-a4b-like", 2816, 704, 128, 8),
        LayerShape("lab-42m", 256, 256, 32, 4),
    )
}
TOKENS = (1, 4, 8, 32, 64, 128, 512, 2048, 8192)


def rotations(tokens: int, shape: LayerShape) -> int:
    """How many routings one timed replay walks through, so that weights leave the 60 MB L2 between uses."""
    if tokens == 1:
        return max(2, min(16, shape.experts // shape.top_k))
    return next((n for most, n in ((8, 8), (128, 4), (512, 2)) if tokens <= most), 1)


def routings(
    shape: LayerShape,
    tokens: int,
    popularity: Popularity = "uniform",
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[tuple[Int32[Tensor, "T K"], Float32[Tensor, "T K"]]]:
    """The rotation's (ids, weights), drawn on the CPU from `seed` so that each machine times the same picks.

    "uniform": K distinct experts a token, all equally likely; for T = 1 the rotation's picks do not overlap as long as
    E / K allows. "zipf": expert popularity falls as 1 / rank over a random ranking.
    """
    if popularity not in ("uniform", "zipf"):
        raise LabError(f"popularity is {popularity!r}; it must be uniform or zipf.")
    e, k = shape.experts, shape.top_k
    draw = torch.Generator().manual_seed(seed * 1_000_003 + tokens)
    deck, out = torch.randperm(e, generator=draw), []
    for r in range(rotations(tokens, shape)):
        if popularity == "zipf":
            rank = torch.randperm(e, generator=draw).float() + 1
            luck = -torch.log(-torch.log(torch.rand(tokens, e, generator=draw).clamp_min(1e-9)))
            ids = (luck - torch.log(rank)).topk(k, dim=1).indices
        elif tokens == 1:
            first = (r * k) % (e - k + 1)
            ids = deck[first : first + k].view(1, k)
        else:
            ids = torch.rand(tokens, e, generator=draw).topk(k, dim=1).indices
        weights = torch.softmax(torch.randn(tokens, k, generator=draw), dim=1)
        out.append((ids.to(device, torch.int32).contiguous(), weights.to(device)))
    return out


def experts_hit(picks: list[tuple[Tensor, Tensor]]) -> float:
    """Distinct experts of a routing, averaged over the rotation."""
    return sum(ids.unique().numel() for ids, _ in picks) / len(picks)


def layer_bytes(
    shape: LayerShape, tokens: int, hit: float, gate_up_bytes: float, down_bytes: float, activation_bytes: int = 2
) -> float:
    """Fewest bytes a layer moves: the weights of the experts hit, once, plus activations in and out.

    `gate_up_bytes`, `down_bytes`: bytes a weight in those matrices.
    """
    d, f = shape.d_model, shape.d_expert
    return hit * d * f * (2 * gate_up_bytes + down_bytes) + 2 * tokens * d * activation_bytes
