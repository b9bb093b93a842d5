"""Memory for a cache, or a refusal that says how much was wanted and what there is.

What is wanted is compared with what is free before anything is taken: an overcommitted arena would end the process at
its first touch, minutes later.
"""

import warnings
from typing import Any

import torch

from moe_lab._types import Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab.stream.memory import LockedBlock, available_host_bytes, host_block

LEAST_LOCKED = 2  # buffers of a ring: one is copied out of while the other is read into


class NoRoom(LabError):
    """Slots that no memory could be had for; fewer might fit. `why`: what stood against them."""

    def __init__(self, slots: int, slot_bytes: int, wanted: int, why: str) -> None:
        self.why = why
        super().__init__(
            f"an expert cache of slots={slots} x {slot_bytes:,} bytes wants {wanted:,} bytes, but {why}. "
            "Lower slots or gib, or free memory."
        )


def check_room(wanted: int, available: int | None, where: str, slots: int, slot_bytes: int) -> None:
    """NoRoom when more bytes are `wanted` than are `available` (None: nobody knows)."""
    if available is not None and wanted > available:
        raise NoRoom(slots, slot_bytes, wanted, f"only {available:,} bytes of {where} are free")


def allocate(wanted: int, device: torch.device, slots: int, slot_bytes: int) -> UInt8[Tensor, " wanted"]:
    """`wanted` bytes on `device`. NoRoom when it refuses."""
    try:
        if device.type == "cpu":
            return host_block(wanted)
        return torch.empty(wanted, dtype=torch.uint8, device=device)
    except (MemoryError, OSError, RuntimeError) as error:  # torch's own out-of-memory errors are RuntimeErrors
        raise NoRoom(slots, slot_bytes, wanted, f"{device} refused it") from error


def locked_ring(buffers: int, buffer_bytes: int, cuda: Any) -> tuple[LockedBlock, int]:
    """Page-locked host memory for `buffers` buffers, and how many it is for.

    Where so much cannot be locked, half as many and so on, down to LEAST_LOCKED; where not even that, all of them in
    ordinary memory. Either with one RuntimeWarning. LabError, nothing taken, when there is no memory at all.
    """
    wanted, free = buffers * buffer_bytes, available_host_bytes()
    if free is not None and wanted > free:
        raise LabError(_no_ring(buffers, buffer_bytes, f"only {free:,} bytes of host memory are free"))
    try:
        block, count = LockedBlock(wanted, cuda, told=False), buffers
        refused = block.refused
        while not block.locked and count // 2 >= LEAST_LOCKED:
            count //= 2
            block = LockedBlock(count * buffer_bytes, cuda, told=False)
        if not block.locked:
            return LockedBlock(wanted, cuda), buffers
    except (MemoryError, OSError) as error:
        raise LabError(_no_ring(buffers, buffer_bytes, "the system refused it")) from error
    if count < buffers:
        got = f"{count} of the {buffers} buffers are page-locked, {block.locked_bytes:,} bytes"
        warnings.warn(f"{refused}; {got}; fewer reads can be under way.", RuntimeWarning, stacklevel=4)
    return block, count


def _no_ring(buffers: int, buffer_bytes: int, why: str) -> str:
    return (
        f"reading experts for a GPU wants {buffers} buffers x {buffer_bytes:,} bytes of host memory, but {why}. "
        "Lower threads, or free memory."
    )
