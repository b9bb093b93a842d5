"""The float GEMV's twin in torch: the same products and additions in the same order, each rounded alike."""

import torch

from moe_lab._types import Float32, Tensor
from moe_lab_kernels.dequantize.dequantize import dequantize_ref
from moe_lab_kernels.dequantize.scaled import dequantize_scaled_ref
from moe_lab_kernels.gemv_float.operands import DENSE, X_GROUP, Rows
from moe_lab_kernels.gemv_float.steps import CODE_PARTS, WALKS
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.minifloat import e2m1_values, e4m3_values, e8m0_values
from moe_lab_kernels.storage.scaled_layouts import LAYOUTS, ScaledLayout

LANES = 32


def unit_index(format: str, kd: int) -> Tensor:
    """int64 [units, 8 * runs]: the values of each unit in the order in which a lane adds them."""
    block, per_block, runs, period = WALKS[format]
    u = torch.arange(kd // block * per_block)
    inside = u % per_block
    start = u // per_block * block + 8 * (runs * period * (inside // period) + inside % period)
    of_run = 8 * period * torch.arange(runs)
    return (start[:, None, None] + of_run[:, None] + torch.arange(8)).flatten(1)


def matvec_ref(rows: Rows, index: Tensor, known: Tensor, w: Weight, slot: int) -> Float32[Tensor, "R N"]:
    """Rows `index` of the activations (zeros where not `known`) times one slot's weight."""
    order = unit_index(w.format, w.kd).to(index.device)
    codes = rows.x if rows.scale is None else e4m3_values(rows.x.view(torch.uint8))
    x = (codes[index].float() * known[:, None])[:, order]
    x = torch.where(known[:, None, None], x, 0.0)[:, None]  # [R, 1, units, 8 * runs]
    layout = LAYOUTS.get(w.format)
    units = order.shape[0]
    steps = -(-units // LANES)

    def lanes(t: Tensor) -> Tensor:
        """[.., units, ..values] -> [.., steps, 32, ..values], padded with zeros."""
        return torch.nn.functional.pad(t, (0, 0, 0, steps * LANES - units)).unflatten(-2, (steps, LANES))

    if layout is None:
        v, x = lanes(_values(w, slot)[:, order][None]), lanes(x)
        acc = torch.zeros(len(index), v.shape[1], LANES, device=x.device)
        for step in range(steps):
            acc = _chain(acc, v[:, :, step], x[:, :, step])
        return _fold(acc)
    v = _codes(w.data[slot], layout)[:, order][None]
    zero = torch.zeros((), device=x.device)
    if layout.code == "u4":
        dot = _chain(zero, v[..., ::2], x[..., ::2]) + _chain(zero, v[..., 1::2], x[..., 1::2])
    else:
        dot = _chain(zero, v, x)
    scale, bias = _scales(w, slot, layout, order)
    add = dot * scale
    if bias is not None:
        sums = x[..., 0]
        for i in range(1, x.shape[-1]):
            sums = sums + x[..., i]
        add = add + (sums * CODE_PARTS[layout.code]) * bias
    if rows.scale is not None:
        add = add * torch.where(known[:, None], rows.scale[index], 0.0)[:, None, order[:, 0] // X_GROUP]
    add = lanes(add[..., None])[..., 0]
    acc = torch.zeros_like(add[:, :, 0])
    for i in range(steps):
        acc = acc + add[:, :, i]
    return _finished(_fold(acc), w, slot, layout)


def values_ref(w: Weight, slot: int) -> Float32[Tensor, "N Kd"]:
    """One slot's weights in fp32, as the decoding kernels give them."""
    if w.format not in LAYOUTS:
        return _values(w, slot)
    second = None if w.second is None else w.second[slot]
    assert w.scales is not None
    return dequantize_scaled_ref(w.data[slot], w.scales[slot], w.format, w.kd, second=second, out_dtype=torch.float32)


def _chain(acc: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """acc + w_0 x_0 + w_1 x_1 + .. over the last axis, from left to right."""
    for i in range(x.shape[-1]):
        acc = acc + w[..., i] * x[..., i]
    return acc


def _fold(acc: Tensor) -> Tensor:
    """Halves against halves over the last axis."""
    while acc.shape[-1] > 1:
        half = acc.shape[-1] // 2
        acc = acc[..., :half] + acc[..., half:]
    return acc.squeeze(-1)


def _values(w: Weight, slot: int) -> Tensor:
    """One slot's weights [N, Kd] in fp32."""
    if w.format in DENSE:
        return w.data[slot].float()
    assert w.format in BLOCKS
    return dequantize_ref(w.data[slot].contiguous(), w.format)


def _codes(data: Tensor, layout: ScaledLayout) -> Tensor:
    """The codes' numbers [N, Kd] as the kernel multiplies them, a power of two too small."""
    if layout.code_bits == 4:
        data = torch.stack([data & 15, data >> 4], -1).flatten(-2)
    read = {"e2m1": e2m1_values, "e4m3": e4m3_values}.get(layout.code, torch.Tensor.float)
    return read(data) * CODE_PARTS[layout.code]


def _scales(w: Weight, slot: int, layout: ScaledLayout, order: Tensor) -> tuple[Tensor, Tensor | None]:
    """Each unit's scale and, of affine formats, bias: fp32 [N, units]."""
    assert w.scales is not None
    n = w.data.shape[1]
    row = torch.arange(n, device=order.device)[:, None] // layout.rows
    group = order[:, 0] // layout.group
    scale = {"e4m3": e4m3_values, "e8m0": e8m0_values, "float": torch.Tensor.float}[layout.scale](w.scales[slot])
    bias = w.second[slot].float()[row, group] if layout.second == "bias" else None  # type: ignore[index]
    return scale[row, group], bias


def _finished(sums: Tensor, w: Weight, slot: int, layout: ScaledLayout) -> Tensor:
    """Rows' sums made whole, and the slot's global scale put on."""
    sums = sums / torch.full_like(sums, CODE_PARTS[layout.code])
    if layout.second == "multiplier":
        return sums * w.second[slot]  # type: ignore[index]
    return sums / w.second[slot] if layout.second == "divisor" else sums  # type: ignore[index]
