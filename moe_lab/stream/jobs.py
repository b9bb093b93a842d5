"""Reads as a pool gets them: pieces of a file, cut into requests, grouped into jobs.

A request is one call of the system's; a job is what a thread takes at once and what is reported.
"""

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from moe_lab.errors import CheckpointError
from moe_lab.stream.joined import Readable

# One request: on two cores and a virtual disk 256 KiB to 1 MiB were the fastest, `moe-lab calibrate` asks the disk.
REQUEST_BYTES = 1 << 20
# A hand-over to a thread costs 13-20 us (two cores, Python 3.11); for less than this it would rival the read.
JOB_BYTES = 1 << 20
_CUT_BYTES = 4096  # requests end where a block of any disk does, so that none is read twice


@dataclass(frozen=True, slots=True)
class Piece:
    """Fill `into` from byte `offset`; `tensor` names it in errors."""

    offset: int
    into: memoryview
    tensor: str


@dataclass(slots=True, eq=False)
class Job:
    """Pieces read by one thread. `done(error | None)` is called once, from that thread, whatever happens.

    `writable` waits until the memory behind the pieces may be overwritten. `background`: nobody waits for it yet.
    `claimed`: a thread has taken the job, or it was withdrawn.
    """

    pieces: Sequence[Piece]
    done: Callable[[Exception | None], None]
    writable: Callable[[], None]
    background: bool = False
    claimed: bool = False


def cut(pieces: Iterable[Piece], request_bytes: int = REQUEST_BYTES) -> Iterator[Piece]:
    """The same reads in requests of `request_bytes`, at most 4096 more, ending at multiples of 4096 bytes of the file.

    The allowance keeps a part that is as long as a request, but begins between two blocks, from leaving a rest of a few
    bytes: that would cost a read of its own.
    """
    for piece in pieces:
        offset, left = piece.offset, piece.into
        while left.nbytes > request_bytes + _CUT_BYTES:
            end = (offset + request_bytes) // _CUT_BYTES * _CUT_BYTES
            take = end - offset if end > offset else request_bytes
            yield Piece(offset, left[:take], piece.tensor)
            offset, left = offset + take, left[take:]
        yield Piece(offset, left, piece.tensor)


def split_jobs(pieces: Iterable[Piece], at_least: int = JOB_BYTES) -> list[list[Piece]]:
    """Neighbouring pieces together until they hold `at_least` bytes: one hand-over for many small reads."""
    groups: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if room <= 0:
            groups.append([])
            room = at_least
        groups[-1].append(piece)
        room -= piece.into.nbytes
    return groups


def read_piece(file: Readable, piece: Piece) -> None:
    """Read one piece whole. A device error (EIO) is tried once more, then raised; so is an early end of the file."""
    try:
        file.read_into(piece.offset, piece.into, tensor=piece.tensor)
    except CheckpointError as error:
        if not (isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO):
            raise
        file.read_into(piece.offset, piece.into, tensor=piece.tensor)
