"""The tensor cores' form of the float GEMV in torch: the same additions in the same order, the instruction's too."""

import torch

from moe_lab._types import Float32, Tensor
from moe_lab_kernels.gemv_float.tensor_steps import CHAIN, OFFSET, STEP, products_of, summed
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.primitives import fma_ref
from moe_lab_kernels.storage.scaled_layouts import LAYOUTS


def refusal(format: str, kd: int) -> str | None:
    """None when the tensor cores multiply rows of `kd` values of the format with bf16, else why not."""
    layout = LAYOUTS.get(format)
    if layout is None or layout.code != "u4":
        return f"the tensor cores multiply 4-bit integers here, not {format}"
    fits = kd >= STEP and kd % layout.group == 0
    return None if fits else f"{format} rows are multiples of {layout.group} values from {STEP} on here, got Kd={kd}"


def parts_of(kd: int) -> int:
    """Parts of a row that are summed apart: part p takes steps p, p + parts, .. of 256 values."""
    return 8 if kd >= 8192 else 4


def chains(group: int) -> Tensor:
    """int64 [chain, 16]: the values of a group that each instruction multiplies, one after another."""
    quarter = group // 4
    of_lane = torch.tensor([[0, 4, 1, 5], [2, 6, 3, 7]])  # a word's two instructions
    word = 8 * torch.arange(quarter // 8)[:, None, None, None]
    return (quarter * torch.arange(4)[:, None] + word + of_lane[:, None]).flatten(0, 1).flatten(1)


def tensor_ref(x: Tensor, index: Tensor, known: Tensor, w: Weight, slot: int) -> Float32[Tensor, "R N"]:
    """Rows `index` of x (zeros where not `known`) times one slot's weight."""
    layout, device = LAYOUTS[w.format], x.device
    assert w.scales is not None
    assert w.second is not None
    order = chains(layout.group).to(device)
    x = x[index].float().unflatten(1, (-1, layout.group))[:, None][..., order]  # [R, 1, groups, chain, 16]
    codes = torch.stack([w.data[slot] & 15, w.data[slot] >> 4], -1).flatten(-2).float() + OFFSET
    codes = codes.unflatten(1, (-1, layout.group))[None][..., order]
    scale, bias = w.scales[slot].float(), w.second[slot].float()
    bias = bias - OFFSET * scale
    dots = torch.zeros(len(index), codes.shape[1], codes.shape[2], device=device)
    sums = torch.zeros(len(index), 1, codes.shape[2], device=device)
    for i in range(len(order)):
        dots = summed(products_of(codes[..., i, :], x[..., i, :]), dots)
        sums = summed(products_of(torch.ones(CHAIN, device=device), x[..., i, :]), sums)
    parts = parts_of(w.kd)
    acc = torch.zeros(parts, *dots.shape[:2], device=device)
    for group in range(dots.shape[2]):
        part = group * layout.group // STEP % parts
        one = fma_ref(dots[..., group], scale[:, group].expand_as(dots[..., group]), acc[part])
        acc[part] = fma_ref(sums[..., group].expand_as(one), bias[:, group].expand_as(one), one)
    while len(acc) > 1:
        acc = acc[: len(acc) // 2] + acc[len(acc) // 2 :]
    return torch.where(known[:, None], acc[0], 0.0)
