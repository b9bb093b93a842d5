"""Several open files as one: what a reader of experts needs to know of a model's parts."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from moe_lab.checkpoint.rawfile import MAX_READ_BYTES, RawFile


@runtime_checkable
class Readable(Protocol):
    """What experts are read from: a RawFile, several joined, or memory. `io_mode` says how."""

    @property
    def io_mode(self) -> str: ...

    def read_into(
        self, offset: int, view: memoryview, *, tensor: str | None = None, request_bytes: int = MAX_READ_BYTES
    ) -> None:
        """Fill `view` from `offset`, about `request_bytes` a call of the system's, or raise CheckpointError."""
        ...

    def close(self) -> None:
        """Give the descriptors back."""
        ...


class JoinedFiles:
    """Several open files as one space of offsets, in the given order; closes them all."""

    def __init__(self, files: Sequence[RawFile]) -> None:
        self._files = tuple(files)
        self._starts = starts_of([file.size for file in files])

    @property
    def io_mode(self) -> str:
        """The files' common way of reading, or each that occurs."""
        return "+".join(dict.fromkeys(file.io_mode for file in self._files))

    def read_into(
        self, offset: int, view: memoryview, *, tensor: str | None = None, request_bytes: int = MAX_READ_BYTES
    ) -> None:
        """RawFile.read_into of the file that holds `offset`; a read never crosses into the next one."""
        number = bisect_right(self._starts, offset) - 1
        self._files[number].read_into(offset - self._starts[number], view, tensor=tensor, request_bytes=request_bytes)

    def close(self) -> None:
        """Give the descriptors back."""
        for file in self._files:
            file.close()


def starts_of(sizes: Sequence[int]) -> list[int]:
    """Where each of several files begins when they follow each other."""
    return [sum(sizes[:number]) for number in range(len(sizes))]
