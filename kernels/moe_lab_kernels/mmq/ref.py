"""`product_ref`, the torch twin of `mmq.steps`: one weight times quantised rows, each operation rounded alike.

Integer dots are fp32 matrix products of integers below 2^24 (exact in any order) or, where sums grow past that, float64
ones; the fp32 steps after them are those of the kernel, group after group, so the bits are the kernel's.
"""

import torch

from moe_lab._types import Float32, Tensor, UInt8
from moe_lab_kernels.mmq.operands import HAS_MINIMA, MmqRows
from moe_lab_kernels.primitives import fma_ref
from moe_lab_kernels.storage.unpack import Unpacked, unpack_ref

LARGEST_SCALE = 2.0**104  # of those that are multiplied with a dot: see `mmq.steps`
LARGEST_D = 4368.0  # of q2_k: from here on d times a scale of 15 may leave fp16


def product_ref(raw: UInt8[Tensor, "N row_bytes"], rows: MmqRows, format: str) -> Float32[Tensor, "R N"]:
    """x @ W^T of rows (codes, scale, total) of the layout that the format takes, or q8_k."""
    u = unpack_ref(raw, format)
    kd = u.codes.shape[-2] * u.codes.shape[-1]
    x = rows.codes[:, :kd].float()
    if rows.layout == "q8_k" and u.codes.shape[-1] == 256:
        return _folded(u, x, rows)
    scale = rows.scale.float()
    acc = torch.zeros(len(x), len(raw), device=raw.device)
    if format == "q2_k":
        return _q2_k(u, x, rows, acc)
    sub = u.codes.shape[-1] // max(u.d.shape[-1], 1 if u.scales is None else u.scales.shape[-1])
    w, d, sc = u.codes.float().flatten(-2), u.d.expand(*u.d.shape[:-1], u.codes.shape[-1] // sub), u.scales
    d = d.flatten(-2)
    sc = torch.ones_like(d) if sc is None else sc.float().flatten(-2)
    sums = _sums(rows) if format in HAS_MINIMA else None
    for g in range(kd // 32):
        at, dy = slice(32 * g, 32 * g + 32), scale[:, g, None]
        if format in ("q8_0", "q4_0", "mxfp4"):
            t = _dots(x, w, at) * _usable(d[:, g])
        elif format == "q3_k":
            t = _dots(x, w * sc.repeat_interleave(16, 1), at) * _usable(d[:, 2 * g])
        elif format in ("q4_k", "q5_k"):
            t = _dots(x, w, at) * _usable(_half(d[:, g] * sc[:, g]))
        else:  # sixteen values a scale: the first rounds nothing, nor does their sum
            step = d if format == "nvfp4" else sc
            first, second = (_dots(x, w, slice(16 * i, 16 * i + 16)) * step[:, i] for i in (2 * g, 2 * g + 1))
            t = first + second
            t = t if format == "nvfp4" else t * d[:, 2 * g]
        acc = fma_ref(t, dy, acc)
        if sums is not None:
            assert u.dmin is not None
            assert u.mins is not None
            low = _half(u.dmin * u.mins.float()).flatten(-2)[:, g]
            acc = _lowered(acc, low, sums[:, g, None], rows)
    return acc


def _q2_k(u: Unpacked, x: Tensor, rows: MmqRows, acc: Tensor) -> Tensor:
    assert u.scales is not None
    assert u.dmin is not None
    assert u.mins is not None
    d, sc = u.d.flatten(-2)[..., None], u.scales.float()
    place = torch.where(d.abs() < LARGEST_D, last_place(d), torch.nan)
    m = torch.where(place.isnan(), 1024, (d / last_place(d)).abs())
    whole = _half(m * sc)  # A in units of d's last place: the dot times it is V
    a = (u.codes.float().unflatten(-1, (16, 16)) * whole[..., None]).flatten(1).double()
    low, sums, tail = _half(u.dmin * u.mins.float()).flatten(-2), _sums(rows), _has_tail(rows)
    place = place[..., 0]
    for g in range(a.shape[1] // 64):
        v = x[:, 64 * g : 64 * g + 64].double() @ a[:, 64 * g : 64 * g + 64].T
        t, dy = v.float() * place[:, g // 4], rows.scale.float()[:, g, None]
        before = (4 * g + 2, 4 * g + 3) if tail and g % 2 else ()
        for i in before:
            t = _lowered(t, low[:, i], sums[:, i, None], rows)
        acc = fma_ref(t, dy, acc)
        for i in range(4 * g, 4 * g + 4):
            if i not in before:
                acc = _lowered(acc, low[:, i], sums[:, i, None], rows)
    return acc


def _folded(u: Unpacked, x: Tensor, rows: MmqRows) -> Tensor:
    assert u.scales is not None
    acc = torch.zeros(len(x), len(u.codes), device=x.device)
    groups = u.scales.shape[-1]
    w = (u.codes.double().unflatten(-1, (groups, -1)) * u.scales.double()[..., None]).flatten(-2)
    if u.mins is not None:
        assert rows.total is not None
        mins = u.mins.float().repeat_interleave(16 // groups, -1)
        sums = rows.total.float().unflatten(1, (-1, 16))
    for b in range(w.shape[1]):
        dots = x[:, 256 * b : 256 * b + 256].double() @ w[:, b].T
        part = dots.float() * u.d[:, b, 0]
        if u.mins is not None:
            assert u.dmin is not None
            part = part - (sums[:, b] @ mins[:, b].T) * u.dmin[:, b, 0]
        acc = fma_ref(part, rows.scale.float()[:, b, None], acc)
    return acc


def _dots(x: Tensor, w: Tensor, at: slice) -> Tensor:
    return x[:, at] @ w[:, at].T


def _lowered(acc: Tensor, low: Tensor, sums: Tensor, rows: MmqRows) -> Tensor:
    """acc - low * sums, rounded once. An fp16 times an fp16, or times a sum of sixteen codes, has 22 bits, which fp32
    holds, so that a plain product does, in a fraction of `fma_ref`'s time; most of q2_k's steps are these."""
    assert rows.total is not None
    return acc - low * sums if rows.total.dtype == torch.float16 else fma_ref(-low, sums, acc)


def _usable(v: Tensor) -> Tensor:
    return torch.where(v.abs() < LARGEST_SCALE, v, torch.nan)


def _half(v: Tensor) -> Tensor:
    return v.half().float()


def last_place(d: Tensor) -> Tensor:
    """The value of an fp16's last bit with the number's sign, as fp32."""
    bits = d.half().view(torch.int16).int()
    exponent = (bits >> 10 & 31).clamp(min=1)
    return ((exponent + 102) << 23 | (bits & 0x8000) << 16).view(torch.float32)


def _has_tail(rows: MmqRows) -> bool:
    assert rows.total is not None
    return rows.total.shape[1] < rows.codes.shape[1] // 16


def _sums(rows: MmqRows) -> Tensor:
    """fp32 [R, groups] as `mmq_operands.sides` lays them out."""
    assert rows.total is not None
    total = rows.total.float()
    if rows.total.dtype == torch.int16:
        return total * rows.scale.float().repeat_interleave(total.shape[1] // rows.scale.shape[1], 1)
    if rows.layout == "d2s6" and _has_tail(rows):
        codes = rows.codes.unflatten(1, (-1, 16)).sum(-1, dtype=torch.int32).float().unflatten(1, (-1, 8))
        return torch.cat([total.unflatten(1, (-1, 6)), codes[..., 6:]], -1).flatten(1)
    return total
