"""Weights with separate scales for kernel tests: genuinely quantised ones, and every code under every scale."""

import torch

from moe_lab.formats import FORMATS, QuantTensor, ScaledFormat

SCALED = tuple(name for name, f in FORMATS.items() if isinstance(f, ScaledFormat))
ONE_OF_A_KIND = ("fp8_block", "nvfp4_modelopt", "nvfp4_ct", "mxfp4_oss", "mxfp8", "int4_g32", "int8_g128")
PACKED = ("nvfp4_modelopt", "nvfp4_ct", "mxfp4_oss")
# experts, N, Kd: two experts, short last blocks, a width that fills no tile, several tiles
SHAPES = {"fp8_block": [(2, 192, 200), (130, 7), (1, 128, 2176)]}
DEFAULT_SHAPES = [(2, 5, 384), (3, 256), (1, 2, 2176)]


def shapes_of(format: str) -> list[tuple[int, ...]]:
    return SHAPES.get(format, DEFAULT_SHAPES)


def heavy_tailed(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    w, wide = torch.randn(shape, generator=draw), torch.rand(shape, generator=draw)
    return w * (1 + 2 * wide**8) / shape[-1] ** 0.5


def quantised(format: str, shape: tuple[int, ...], seed: int = 0) -> QuantTensor:
    return QuantTensor.encode(heavy_tailed(shape, seed), FORMATS[format])


def every_code(format: str, shape: tuple[int, ...]) -> QuantTensor:
    """Codes and scale bytes drawn from all 256: NaN codes, subnormal and overflowing scales among them."""
    q, draw = quantised(format, shape), torch.Generator().manual_seed(1)

    def any_byte(t: torch.Tensor) -> torch.Tensor:
        return torch.randint(0, 256, t.shape, dtype=torch.uint8, generator=draw)

    assert q.scales is not None
    scales = any_byte(q.scales) if q.scales.dtype == torch.uint8 else q.scales
    return QuantTensor.from_parts(any_byte(q.data), scales, q.global_scale, format, shape, biases=q.biases)


def operands(q: QuantTensor) -> tuple[tuple, dict]:
    """Arguments of `dequantize_scaled`."""
    second = q.biases if q.biases is not None else q.global_scale
    return (q.data, q.scales, q.format, q.shape[-1]), {"second": second}
