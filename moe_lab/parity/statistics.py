"""Activations and weights of known statistics, seeded: what an arm's error depends on besides the arm.

Numbers of a row's values are what matters to 8-bit activations: the largest value of a block fixes its scale, the mean
its sum. Weights come out of a heavy-tailed distribution and are then really quantised (`lab.quantize`): random bytes
would leave sc * q - m far from zero mean, and with it the main difference between the arms would vanish.
"""

from collections.abc import Callable

import torch

from moe_lab._types import Float32, Tensor
from moe_lab.checks import wants_whole
from moe_lab.errors import LabError
from moe_lab.formats import quantize
from moe_lab.layer import MoELayer
from moe_lab.spec import MoESpec, RouterSpec

Draw = Callable[[int, int, torch.Generator], Tensor]
FREEDOM, WEIGHT_SCALE = 6, 0.03  # Student-t weights: outliers as trained matrices have them


def _normal(tokens: int, width: int, g: torch.Generator) -> Tensor:
    return torch.randn(tokens, width, generator=g)


def _swiglu(tokens: int, width: int, g: torch.Generator) -> Tensor:
    return torch.nn.functional.silu(_normal(tokens, width, g)) * _normal(tokens, width, g)


def _outliers(tokens: int, width: int, g: torch.Generator) -> Tensor:
    x = _normal(tokens, width, g)
    x[:, torch.randperm(width, generator=g)[:8]] *= 60
    return x


STATISTICS: dict[str, Draw] = {
    "gaussian": _normal,
    "swiglu": _swiglu,
    "outliers": _outliers,
    "tiny": lambda tokens, width, g: 3e-5 * _normal(tokens, width, g),
    "large mean": lambda tokens, width, g: 3e3 + 3e3 * _normal(tokens, width, g),
}
"""Name -> draw(T, Kd, generator): N(0, 1); silu(N) N, what a down projection reads; N with 8 channels 60 times as
large; N(0, 3e-5), whose fp16 scales are subnormal; N(3e3, 3e3), whose sums of 32 pass fp16's 65504."""


def draw(statistics: str, tokens: int, width: int, *, seed: int = 0) -> Float32[Tensor, "T Kd"]:
    """Rows by a name of `STATISTICS`; equal arguments give equal rows. LabError for another name."""
    if statistics not in STATISTICS:
        raise LabError(f"no statistics are called {statistics!r}; known: {', '.join(STATISTICS)}.")
    wants_whole("tokens", tokens, 0)
    wants_whole("the width", width, 8)
    return STATISTICS[statistics](tokens, width, _generator("rows", seed))


def _generator(stream: str, seed: int) -> torch.Generator:
    """One for each use of a seed: rows and weights drawn from the same numbers would be correlated."""
    return torch.Generator().manual_seed(16 * seed + ("rows", "weights", "router").index(stream))


def heavy_tailed(*shape: int, seed: int = 0) -> Float32[Tensor, "*shape"]:
    """Weights 0.03 t, t Student's with 6 degrees of freedom: a normal value over the root of a chi-square's mean."""
    g = _generator("weights", seed)
    squares = torch.stack([torch.randn(shape, generator=g).square_() for _ in range(FREEDOM)]).mean(0)
    return WEIGHT_SCALE * torch.randn(shape, generator=g) / squares.sqrt_()


def wide_layer(
    gate: str = "q2_k",
    down: str = "q3_k",
    *,
    d_model: int = 2048,
    d_expert: int = 256,
    experts: int = 4,
    top_k: int = 2,
    seed: int = 0,
) -> MoELayer:
    """A layer of `heavy_tailed` weights, gate and up in one format, down in another; its router is Gaussian.

    For what a row of one block cannot show: block and order effects. Defaults: 4 experts, rows of 2048 and 256 values.
    """
    router = torch.randn(experts, d_model, generator=_generator("router", seed)) / d_model**0.5
    spec = MoESpec(
        RouterSpec(experts, top_k, normalize=True), d_model=d_model, d_expert=d_expert, family="heavy_tailed"
    )
    shapes = {"gate": (d_expert, d_model), "up": (d_expert, d_model), "down": (d_model, d_expert)}
    formats = {"gate": gate, "up": gate, "down": down}
    made = {
        name: quantize(heavy_tailed(experts, *shape, seed=seed + i), formats[name])
        for i, (name, shape) in enumerate(shapes.items(), start=1)
    }
    return MoELayer.from_tensors(spec, router=router, gate=made["gate"], up=made["up"], down=made["down"])
