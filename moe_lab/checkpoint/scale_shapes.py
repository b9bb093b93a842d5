"""The shapes that codes and scales of one weight must have, from the header alone.

fp8_block: codes [.., N, Kd], scales [.., ceil(N / 128), ceil(Kd / 128)] or a single one for the whole weight.
mxfp8: codes [.., N, Kd], scales [.., N, Kd / 32]. nvfp4: codes [.., N, Kd / 2], scales [.., N, Kd / 16], one global
scale, or one for each matrix. mxfp4: codes [.., N, Kd / 2] or [.., N, Kd / 32, 16], scales [.., N, Kd / 32].
affine: codes [.., N, Kd * bits / 32] in 32-bit words, scales and biases [.., N, Kd / group].
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from moe_lab.checkpoint.tensor_info import TensorInfo
from moe_lab.errors import CheckpointError

FP8_BLOCK, MX_BLOCK, NV_BLOCK, WORD_BITS = 128, 32, 16, 32
_AFFINE_BITS, _AFFINE_GROUPS = (4, 8), (32, 64, 128)

Shape = tuple[int, ...]


def value_shape(format: str, data: TensorInfo, scales: TensorInfo, global_scale: TensorInfo | None = None) -> Shape:
    """The shape of the values, [.., N, Kd]. CheckpointError "scale shape" naming the scales when they cannot fit."""
    if len(data.shape) < 2:
        _misfit(scales, f"its codes {data.name!r} have shape {list(data.shape)}; a scaled weight is [.., N, Kd].", data)
    shape, accepted = _LAYOUTS[format](data.shape, scales.shape)
    if (
        format == "fp8_block" and "gate_up" in data.name
    ):  # each half may own its rows of scales: 2 * 2, not 3, for 2 * 192
        halves = _fp8_block((*shape[:-2], shape[-2] // 2, shape[-1]), ())[1][0]
        accepted.append((*halves[:-2], 2 * halves[-2], halves[-1]))
    if not accepted:
        _misfit(scales, f"codes {data.name!r} of shape {list(data.shape)} are no whole blocks of {format}.", data)
    if scales.shape not in accepted:
        wanted = f"{list(accepted[0])}"
        _misfit(
            scales,
            f"has shape {list(scales.shape)}, but {format} codes {data.name!r} of shape {list(data.shape)} "
            f"need scales {wanted}.",
            wanted,
        )
    matrices = math.prod(shape[:-2])
    fused = 2 * matrices if "gate_up" in data.name else matrices  # gate and up have global scales of their own
    if global_scale is not None and math.prod(global_scale.shape) not in (1, matrices, fused):
        wanted = "1 value" if matrices == 1 else f"1 or {matrices} values, one a matrix"
        _misfit(global_scale, f"has shape {list(global_scale.shape)}; {format} wants {wanted} here.", wanted)
    return shape


def affine_shape(
    stem: str, data: TensorInfo, scales: TensorInfo, biases: TensorInfo, config: Mapping[str, Any]
) -> tuple[str, Shape] | str:
    """(format, shape of the values) of affine codes, or why they cannot be told. Bits and group come from config.json:
    4 bits in groups of 64 and 8 bits in groups of 32 have the same shapes.
    """
    settings = config.get("quantization")
    settings = settings if isinstance(settings, Mapping) else {}
    own = settings.get(stem)
    merged = {**settings, **own} if isinstance(own, Mapping) else settings
    bits, group = merged.get("bits"), merged.get("group_size")
    if type(bits) is not int or bits not in _AFFINE_BITS or group not in _AFFINE_GROUPS:
        return (
            f"affine codes with .scales and .biases want quantization.bits of {_AFFINE_BITS} and "
            f"quantization.group_size of {_AFFINE_GROUPS} in config.json, which says {bits!r} and {group!r}."
        )
    if not data.shape or data.shape[-1] * WORD_BITS // bits % group:
        _misfit(scales, f"codes {data.name!r} of shape {list(data.shape)} are no whole groups of {group}.", data)
    shape = (*data.shape[:-1], data.shape[-1] * WORD_BITS // bits)
    wanted = (*shape[:-1], shape[-1] // group)
    for part in (scales, biases):
        if part.shape != wanted:
            text = f"has shape {list(part.shape)}, but {bits}-bit codes of {list(shape)} need {list(wanted)}."
            _misfit(part, text, list(wanted))
    return f"int{bits}_g{int(group)}", shape


def scale_table(format: str, shape: Shape) -> Shape | None:
    """The full shape of the scales of a format whose file may give one scale for the whole weight; None for others."""
    return _fp8_block(shape, ())[1][0] if format == "fp8_block" else None


def _fp8_block(codes: Shape, scales: Shape) -> tuple[Shape, list[Shape]]:
    *lead, rows, columns = codes
    table = (*lead, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    return codes, [table, (), (1,), (1, 1)]


def _mxfp8(codes: Shape, scales: Shape) -> tuple[Shape, list[Shape]]:
    return codes, _blocks(codes, MX_BLOCK)


def _nvfp4(codes: Shape, scales: Shape) -> tuple[Shape, list[Shape]]:
    shape = (*codes[:-1], 2 * codes[-1])
    return shape, _blocks(shape, NV_BLOCK)


def _mxfp4(codes: Shape, scales: Shape) -> tuple[Shape, list[Shape]]:
    *rows, last = codes
    if len(codes) >= 3 and len(codes) == len(scales) + 1 and last == MX_BLOCK // 2:
        *rows, blocks = rows
        shape = (*rows, blocks * MX_BLOCK)
    else:
        shape = (*rows, 2 * last)
    return shape, _blocks(shape, MX_BLOCK)


def _blocks(shape: Shape, block: int) -> list[Shape]:
    return [] if shape[-1] % block else [(*shape[:-1], shape[-1] // block)]


_LAYOUTS: dict[str, Callable[[Shape, Shape], tuple[Shape, list[Shape]]]] = {
    "fp8_block": _fp8_block, "mxfp8": _mxfp8, "nvfp4_modelopt": _nvfp4, "nvfp4_ct": _nvfp4, "mxfp4_oss": _mxfp4,
}  # fmt: skip


def _misfit(tensor: TensorInfo, message: str, wanted: object) -> NoReturn:
    raise CheckpointError(
        tensor.file, "scale shape", message, tensor=tensor.name, seen=list(tensor.shape), wanted=wanted
    )
