"""A layer's weights out of its tensors: experts stacked to [E, N, Kd], fused ones taken apart, axes swapped back.

Experts that are runs of bytes are read straight into their stack; the rest is read whole and rearranged.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from moe_lab._types import Tensor
from moe_lab.checkpoint.expert_slice import ExpertSlice
from moe_lab.checkpoint.names import Stored
from moe_lab.checkpoint.scaled_slices import one_format
from moe_lab.checkpoint.slices import check_format, expert_slice, why_not_runs
from moe_lab.checkpoint.tensor_file import TensorFile
from moe_lab.errors import CheckpointError, LabError
from moe_lab.families import TensorNames
from moe_lab.formats import QuantTensor

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def read_experts(file: TensorFile, names: TensorNames, tensors: Mapping[str, Stored], role: str) -> QuantTensor | None:
    """gate, up [E, F, D] or down [E, D, F] of a layer; None where it has no such part."""
    fused = role != "down" and "gate_up" in tensors
    stored = tensors.get("gate_up" if fused else role)
    if stored is None:
        return None
    if not stored.scaled and why_not_runs(names, stored, fused) is None:
        part = expert_slice(file, names, tensors, role)
        assert part is not None
        return _read_runs(file, part)
    stack = _read_stack(file, stored)
    if names.transposed and not stored.scaled:
        stack = _swapped(stack)
    return _half(file, names, stored, stack, second=role == "up") if fused else stack


def read_shared(file: TensorFile, tensors: Mapping[str, Stored], role: str) -> QuantTensor | None:
    """shared_gate, shared_up [Fs, D] or shared_down [D, Fs]; None where the layer has none."""
    fused = role != "shared_down" and "shared_gate_up" in tensors
    stored = tensors.get("shared_gate_up" if fused else role)
    if stored is None:
        return None
    whole = _quant(file, stored.infos[0].name, stored)
    if not fused:
        return whole
    half = whole.shape[-2] // 2
    return _rows(file, stored, whole, slice(half, None) if role == "shared_up" else slice(0, half))


def read_biases(file: TensorFile, names: TensorNames, tensors: Mapping[str, Stored]) -> dict[str, Tensor] | None:
    """gate, up [E, F] and down [E, D] biases of the experts; None where they have none."""
    if "down_bias" not in tensors:
        return None
    found = {"down": read_dense(file, tensors["down_bias"])}
    if "gate_up_bias" in tensors:
        both = read_dense(file, tensors["gate_up_bias"])
        found["gate"], found["up"] = (both[:, r].contiguous() for r in _half_rows(names, both.shape[1]))
        return found
    for part in ("gate", "up"):
        if f"{part}_bias" in tensors:
            found[part] = read_dense(file, tensors[f"{part}_bias"])
    return found


def read_dense(file: TensorFile, stored: Stored) -> Tensor:
    """A tensor's values in its own dtype, block formats decoded to fp32."""
    held = file.read(stored.infos[0].name)
    return held.dequantize() if isinstance(held, QuantTensor) else held


def _read_runs(file: TensorFile, part: ExpertSlice) -> QuantTensor:
    try:
        data = np.empty((len(part.places), part.expert_nbytes), np.uint8)
    except MemoryError as error:
        nbytes = len(part.places) * part.expert_nbytes
        what = f"no memory for its experts' {nbytes} bytes. Stream them: pass a lab.ExpertCache as cache=."
        raise CheckpointError(file.path, "memory", what, tensor=part.tensor(0), seen=nbytes) from error
    for expert, (path, offset) in enumerate(part.places):
        file.parts[path].read_into(offset, data[expert].data, tensor=part.tensor(expert))
    return QuantTensor.from_bytes(torch.from_numpy(data), part.format, part.shape)


def _read_stack(file: TensorFile, stored: Stored) -> QuantTensor:
    """All experts as one QuantTensor in the stored axes."""
    one_format(file, stored)
    read = [_quant(file, info.name, stored) for info in stored.infos]
    if not stored.per_expert:
        return read[0]
    stacked = {name: torch.stack([q.tensors[name] for q in read]) for name in read[0].tensors}
    return replace(read[0], shape=(len(read), *read[0].shape), **stacked)


def _quant(file: TensorFile, name: str, stored: Stored) -> QuantTensor:
    for info in stored.infos:
        check_format(file, info)
    held = file.read(name)
    return held if isinstance(held, QuantTensor) else _wrapped(held)


def _wrapped(values: Tensor) -> QuantTensor:
    raw = values.contiguous().view(torch.uint8)
    return QuantTensor.from_bytes(raw, _DTYPES[values.dtype], tuple(values.shape))


def _swapped(stack: QuantTensor) -> QuantTensor:
    """[.., N, Kd] of plain values from [.., Kd, N]."""
    dtype = next(dtype for dtype, name in _DTYPES.items() if name == stack.format)
    return _wrapped(stack.data.contiguous().view(dtype).reshape(stack.shape).transpose(-1, -2))


def _half_rows(names: TensorNames, rows: int) -> tuple[slice, slice]:
    """Rows of gate and of up in a fused axis of `rows`."""
    if names.interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, rows // 2), slice(rows // 2, None)


def _half(file: TensorFile, names: TensorNames, stored: Stored, stack: QuantTensor, *, second: bool) -> QuantTensor:
    return _rows(file, stored, stack, _half_rows(names, stack.shape[-2])[second])


def _rows(file: TensorFile, stored: Stored, q: QuantTensor, rows: slice) -> QuantTensor:
    """Some of the N rows with their scales. CheckpointError "scale shape" where a scale belongs to rows of both."""
    try:
        part = q.rows(rows)
    except LabError as error:
        raise CheckpointError(
            file.path, "scale shape", f"gate and up cannot be taken apart: {error}", tensor=stored.infos[0].name
        ) from error
    return replace(part, **{name: t.contiguous() for name, t in part.tensors.items()})
