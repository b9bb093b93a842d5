"""Which weight slots a work list uses, and a place for each: on the device, for a host that knows neither.

Slots are numbered by place in ascending order, 0 .. used - 1, so that a piece of scratch with room for C weights serves
any arena C slots at a time.
"""

from typing import NamedTuple

import torch

from moe_lab._types import Tensor
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.grouped.tiles import WorkList

AT_ONCE = 1024  # tiles or slots a turn


class Places(NamedTuple):
    """of_slot int32 [S]: a slot's place, -1 where no tile uses it; slots int32 [most]: the slot at a place, -1 from the
    last one on. `most` is min(tiles, S)."""

    of_slot: Tensor
    slots: Tensor


@jit(do_not_specialize=["n_tiles", "n_slots", "most"])
def _places(tiles, of_slot, slots, n_tiles, n_slots, most, AT_ONCE: tl.constexpr):
    """One program: its threads wait for each other between the turns."""
    i = tl.arange(0, AT_ONCE)
    for at in range(0, n_slots, AT_ONCE):
        tl.store(of_slot + at + i, -1, mask=at + i < n_slots)
        tl.store(slots + at + i, -1, mask=at + i < most)
    tl.debug_barrier()
    for at in range(0, n_tiles, AT_ONCE):
        there = at + i < n_tiles
        slot = tl.load(tiles + 3 * (at + i), mask=there, other=-1)
        n = tl.load(tiles + 3 * (at + i) + 2, mask=there, other=0)
        tl.store(of_slot + slot, 0, mask=(slot >= 0) & (slot < n_slots) & (n > 0))
    tl.debug_barrier()
    before = 0
    for at in range(0, n_slots, AT_ONCE):
        used = tl.load(of_slot + at + i, mask=at + i < n_slots, other=-1, volatile=True) == 0
        place = before + tl.cumsum(used.to(tl.int32), 0) - 1
        tl.store(of_slot + at + i, place, mask=used)
        tl.store(slots + place, at + i, mask=used)
        before += tl.sum(used.to(tl.int32), 0)


def places(work: WorkList, n_slots: int) -> Places:
    """Places of the slots that tiles with rows name (Triton). Entries outside 0 .. n_slots - 1 are no slots."""
    out = _empty(work, n_slots)
    if len(out.slots):
        args = (work.tiles, *out, len(work.tiles), n_slots, len(out.slots), AT_ONCE)
        backend.launch(_places, (1,), *args, device=work.tiles.device, num_warps=8)
    return out


def places_ref(work: WorkList, n_slots: int) -> Places:
    """The same in torch, exactly."""
    of_slot, slots = _empty(work, n_slots)
    slot, n = work.tiles[:, 0], work.tiles[:, 2]
    used = slot[(slot >= 0) & (slot < n_slots) & (n > 0)].unique().to(torch.int32)
    of_slot.fill_(-1)[used.long()] = torch.arange(len(used), dtype=torch.int32, device=used.device)
    slots.fill_(-1)[: len(used)] = used
    return Places(of_slot, slots)


def _empty(work: WorkList, n_slots: int) -> Places:
    like = {"dtype": torch.int32, "device": work.tiles.device}
    return Places(torch.empty(n_slots, **like), torch.empty(min(len(work.tiles), n_slots), **like))
