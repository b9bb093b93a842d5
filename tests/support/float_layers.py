"""Layers for the decode arms' tests: any formats, and every formula that they compute."""

from functools import cache

import torch

from moe_lab.formats import quantize
from moe_lab.layer import MoELayer
from moe_lab.spec import MoESpec, RouterSpec

E, K, D, F = 5, 2, 256, 256
FORMULAS: dict[str, dict] = {
    "plain": {},
    "oai-biases": {"expert_bias": True, "limit": 1.0, "limit_mode": "oai"},
    "after": {"limit": 0.5, "limit_mode": "after"},
    "geglu-before": {"activation": "gelu_tanh", "limit": 1.0},
    "weight-inside": {"weight_place": "hidden"},
    "weight-on-input": {"weight_place": "input"},
}
# Without biases and with the weight on the output: on q8_1 rows all three products are one launch.
OF_ONE_LAUNCH: dict[str, dict] = {
    "geglu-before": FORMULAS["geglu-before"],
    "limit-before": {"limit": 0.5},
    "limit-after": FORMULAS["after"],
    "oai": {"limit": 1.0, "limit_mode": "oai"},
}


@cache
def make(formats: tuple[str, str, str], formula: str = "plain") -> MoELayer:
    """A layer whose gate, up and down have these formats. Do not change it."""
    draw = torch.Generator().manual_seed(11)
    normal = lambda *s: torch.randn(*s, generator=draw) * s[-1] ** -0.5  # noqa: E731
    parts = {n: quantize(normal(E, *s), f) for (n, s), f in
             zip({"gate": (F, D), "up": (F, D), "down": (D, F)}.items(), formats, strict=True)}  # fmt: skip
    spec = MoESpec(RouterSpec(E, K, normalize=True), D, F, **{**FORMULAS, **OF_ONE_LAUNCH}[formula])
    biases = {n: torch.randn(E, w, generator=draw) for n, w in (("gate", F), ("up", F), ("down", D))}
    return MoELayer.from_tensors(spec, router=normal(E, D) * 4, biases=biases if spec.expert_bias else None, **parts)


def rows(tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Gaussian [T, D]."""
    return torch.randn(tokens, D, generator=torch.Generator().manual_seed(tokens)).to(dtype)
