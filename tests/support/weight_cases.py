"""Weights that quantisers stumble over, by name: fp32 [rows, width], the same numbers every time."""

from collections.abc import Callable

import torch

from moe_lab._types import Tensor

Draw = torch.Generator


def _normal(n: int, k: int, g: Draw) -> Tensor:
    return torch.randn(n, k, generator=g)


def _student_t3(n: int, k: int, g: Draw) -> Tensor:
    chi_squared = sum(_normal(n, k, g).square() for _ in range(3))
    return _normal(n, k, g) / (chi_squared / 3).sqrt()


def _outliers(n: int, k: int, g: Draw) -> Tensor:
    return _normal(n, k, g) * torch.where(torch.rand(n, k, generator=g) < 0.01, 2.0, 0.02)


def _one_hot(n: int, k: int, g: Draw) -> Tensor:
    return torch.zeros(n, k).scatter_(1, torch.randint(k, (n, 1), generator=g), _normal(n, 1, g))


def _sub_block_scales(n: int, k: int, g: Draw, spread: float = 8.0) -> Tensor:
    """Groups of 16 whose magnitudes differ by many powers of ten, at most about 1."""
    return _normal(n, k, g) * torch.exp(-spread * _normal(n, k // 16, g).abs()).repeat_interleave(16, 1)


def _ties(n: int, k: int, g: Draw) -> Tensor:
    return torch.randint(-8, 9, (n, k), generator=g) * 0.25


def _three_values(n: int, k: int, g: Draw) -> Tensor:
    return torch.randint(-1, 2, (n, k), generator=g) * torch.rand(n, 1, generator=g)


def _near(n: int, k: int, g: Draw, centre: float) -> Tensor:
    """One value and small differences from it: (max - min) of a sub-block of many sizes."""
    return centre + centre * torch.rand(n, k, generator=g) * torch.logspace(-8, 0, n)[:, None]


KINDS: dict[str, Callable[[int, int, Draw], Tensor]] = {
    "gaussian": _normal,
    "student_t3": _student_t3,
    "outliers": _outliers,
    "tiny": lambda n, k, g: _normal(n, k, g) * 1e-6,
    "huge": lambda n, k, g: _normal(n, k, g) * 3e4,
    "zeros": lambda n, k, g: torch.zeros(n, k),
    "one_hot": _one_hot,
    "constant": lambda n, k, g: _normal(n, 1, g).expand(n, k).contiguous(),
    "ties": _ties,
    "three_values": _three_values,
    "ramp": lambda n, k, g: torch.arange(k) * torch.rand(n, 1, generator=g) + _normal(n, 1, g),
    "negative": lambda n, k, g: -torch.rand(n, k, generator=g),
    "near_minus_one": lambda n, k, g: _near(n, k, g, -1.0),
    "near_one": lambda n, k, g: _near(n, k, g, 1.0),
    "subnormal": lambda n, k, g: _normal(n, k, g) * 1e-40,
    "at_the_zero_limit": lambda n, k, g: _normal(n, k, g) * 1e-15,
    "sub_block_scales": _sub_block_scales,
    "sparse": lambda n, k, g: _normal(n, k, g) * (torch.rand(n, k, generator=g) < 0.05),
    "bf16_grid": lambda n, k, g: _normal(n, k, g).bfloat16().float(),
}


def weights(kind: str, rows: int, width: int, seed: int = 5) -> Tensor:
    """fp32 [rows, width] of a kind."""
    return KINDS[kind](rows, width, torch.Generator().manual_seed(seed))
