"""`open_weight_ref`, the torch twin of `mmq.opened`: one weight's codes, scales and minima, exactly."""

import torch

from moe_lab._types import Tensor
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.mmq.opened import FORMS, Opened
from moe_lab_kernels.mmq.operands import raw_of
from moe_lab_kernels.mmq.ref import LARGEST_D, LARGEST_SCALE, last_place
from moe_lab_kernels.storage.unpack import unpack_ref


def open_weight_ref(w: Weight, slot: int, folded: bool) -> Opened:
    """Slot's weight as `open_weights` writes it to one place: codes, scale and low without the first axis."""
    form, u = FORMS[w.format, folded], unpack_ref(raw_of(w, slot).contiguous(), w.format)
    n, d = len(u.codes), u.d.flatten(1)
    scales = torch.ones_like(u.codes[..., :1]) if u.scales is None else u.scales
    each = u.codes.int().unflatten(-1, (scales.shape[-1], -1))
    scaled = (each * scales.int()[..., None]).view(n, -1)
    low = None
    if u.dmin is not None and u.mins is not None:
        low = -_half(u.dmin * u.mins.float()).flatten(1)
    if folded:
        turned = -1 if w.format == "q3_k" else 1
        parts = (turned * scaled,) if form.parts == 1 else _digits(scaled)
        scale = torch.stack([turned * d] + ([] if u.dmin is None else [u.dmin.flatten(1)]), -1)
        if u.mins is not None:
            low = u.mins.repeat_interleave(16 // u.mins.shape[-1], -1).half()
    elif form.step == "pair":
        place = torch.where(d.abs() < LARGEST_D, last_place(d), torch.nan)
        m = torch.where(place.isnan(), _large(d), (d / last_place(d)).abs())
        beside = (_half(m[..., None] * scales) - m[..., None] * scales + scales).int()
        parts = (scaled, (each * beside[..., None]).view(n, -1))
        scale = torch.stack([place, (m - 1) * place], -1)
        assert low is not None
        low = low.unflatten(1, (-1, 4))
    elif form.step == "digits":
        parts, scale = _digits(scaled), d[..., None]
    elif form.step == "halves":
        sixteens, none = u.codes.view(n, -1, 2, 16), torch.zeros_like(u.codes.view(n, -1, 2, 16)[:, :, :1])
        halves = (sixteens[:, :, :1], none), (none, sixteens[:, :, 1:])
        parts = tuple(torch.cat(half, 2).view(n, -1) for half in halves)
        scale = d.view(n, -1, 2)
    elif w.format == "q3_k":
        parts, scale = (-scaled,), -d[..., None]
    else:
        finer = 16 if w.format == "q4_0" else 1  # its codes fill the byte
        parts = (finer * u.codes.view(n, -1),)
        scale = (d / finer if u.scales is None else _half(u.d * scales.float()).flatten(1))[..., None]
    if form.step == "one":
        scale = torch.where(scale.abs() < LARGEST_SCALE, scale, torch.nan)
        if low is not None:
            scale, low = torch.cat([scale, low[..., None]], -1), None
    codes = torch.stack([p.to(torch.int8).view(n, -1, form.width) for p in parts], 1).permute(2, 1, 0, 3)
    scale = scale.transpose(0, 1)
    return Opened(codes, scale, scale if low is None else low.transpose(0, 1), form)


def _half(v: Tensor) -> Tensor:
    return v.half().float()


def _large(d: Tensor) -> Tensor:
    """|d| in units of its last place where that leaves no fp16 product: its eleven bits."""
    bits = d.half().view(torch.int16).int() & 0x3FF
    return (bits | 0x400).float()


def _digits(v: Tensor) -> tuple[Tensor, Tensor]:
    low = (v + 128 & 255) - 128
    return v - low >> 8, low
