"""The buffers that readers fill on the way to a slot: a few of them, taken and given back in turn."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from moe_lab._types import Tensor


@dataclass(slots=True, eq=False)
class Stage:
    """Where a reader puts one expert's bytes: the slot itself on the host, a buffer of these for a device."""

    view: memoryview
    tensor: Tensor | None = None
    copied: Any = None  # event of the last copy out of this buffer, None before the first
    borrowed: bool = False  # the source's own memory, which nobody takes back

    def wait_writable(self) -> None:
        """Block the reader thread until the last copy out of this buffer has ended."""
        if self.copied is not None:
            self.copied.synchronize()


class Stages:
    """Buffers of one expert each, `rows` uint8 [n, bytes] on the host. Not safe by itself: the cache's lock is held."""

    def __init__(self, rows: Iterable[Tensor]) -> None:
        self.every = [Stage(row.numpy().data, row) for row in rows]
        self.free: dict[int, Stage] = {}  # by id, oldest first: giving a buffer back twice is giving it back once
        self.reclaim(())

    def take(self) -> Stage | None:
        """The free buffer given back first; None while all are in use."""
        return self.free.pop(next(iter(self.free))) if self.free else None

    def give(self, stage: Stage) -> None:
        """Take the buffer back; its next reader waits for the last copy out of it."""
        if not stage.borrowed:
            self.free[id(stage)] = stage

    def reclaim(self, in_use: Collection[Stage]) -> None:
        """Take back every buffer that is not `in_use`: an interrupted caller may have lost one."""
        busy = {id(stage) for stage in in_use}
        for stage in self.every:
            if id(stage) not in busy:
                self.give(stage)

    def clear(self) -> None:
        """Forget them all."""
        self.every.clear()
        self.free.clear()
