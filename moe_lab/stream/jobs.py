"""Reads as a pool gets them: pieces of a file, grouped into jobs.

A job is what a thread takes at once and what is reported; a piece is a range of a file, read in requests, which are
one call of the system's each.
"""

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from moe_lab.errors import CheckpointError
from moe_lab.stream.joined import Readable

# One request: in huge pages 4 MiB cost the processor less than 1 MiB does (0.045 against 0.060 s a GB, two cores and a
# virtual disk) and are no slower, as the system splits them for the disk anyhow; `moe-lab calibrate` asks the disk.
REQUEST_BYTES = 4 << 20
# A hand-over to a thread costs 13-20 us (two cores, Python 3.11); for less than this it would rival the read.
JOB_BYTES = 1 << 20
# What is read in the background at once: behind it the reader looks whether somebody waits, or nobody wants the rest.
# Four threads then have 1 MiB under way when the picks come, half a millisecond of a disk of 2 GB/s.
AHEAD_BYTES = 256 << 10
CUT_BYTES = 4096  # requests end where a block of any disk does, so that none is read twice


@dataclass(frozen=True, slots=True)
class Piece:
    """Fill `into` from byte `offset`, about `request_bytes` a call of the system's; `tensor` names it in errors."""

    offset: int
    into: memoryview
    tensor: str
    request_bytes: int = REQUEST_BYTES


@dataclass(slots=True, eq=False)
class Job:
    """Pieces read by one thread. `done(error | None)` is called once, from that thread, whatever happens.

    `writable` waits until the memory behind the pieces may be overwritten. `background`: nobody waits for it yet.
    `claimed`: a thread has taken the job; `back`: it was given up before one had. `at`: the next piece to read. `stop`:
    it was given up while it was read.
    """

    pieces: Sequence[Piece]
    done: Callable[[Exception | None], None]
    writable: Callable[[], None]
    background: bool = False
    claimed: bool = False
    back: bool = False
    at: int = 0
    stop: bool = False

    @property
    def free(self) -> bool:
        """Whether a thread may take it."""
        return not self.claimed and not self.back

    @property
    def read_bytes(self) -> int:
        """Bytes read so far."""
        return sum(piece.into.nbytes for piece in self.pieces[: self.at])

    def next_piece(self) -> Piece:
        """The piece at `at`: whole where somebody waits for it, else about AHEAD_BYTES of it, its rest as another.

        Cut here and not beforehand, so that what is promoted is read on in whole requests. In pieces of 256 KiB 14
        experts of 12 MiB took 613 reads and 95 ms of waiting, like this 122 and 74 (eight threads, 2.4 GB/s).
        """
        piece = self.pieces[self.at]
        if self.background and piece.into.nbytes > AHEAD_BYTES + CUT_BYTES:
            take = _first_bytes(piece.offset, AHEAD_BYTES, CUT_BYTES)
            rest = Piece(piece.offset + take, piece.into[take:], piece.tensor, piece.request_bytes)
            piece = Piece(piece.offset, piece.into[:take], piece.tensor, piece.request_bytes)
            self.pieces = [*self.pieces[: self.at], piece, rest, *self.pieces[self.at + 1 :]]
        return piece


class GivenUp(Exception):
    """What a job that was stopped between two pieces ends with."""


def give_up(jobs: Iterable[Job]) -> None:
    """Nobody wants these any more: what no thread has taken is taken back, what one reads stops at its next piece."""
    for job in jobs:
        if job.claimed:
            job.stop = True
        else:
            job.back = True


def cut(pieces: Iterable[Piece], most_bytes: int = REQUEST_BYTES) -> Iterator[Piece]:
    """The same reads in pieces of about `most_bytes`, so that several threads can share them (see `cut_range`)."""
    for piece in pieces:
        for offset, into in cut_range(piece.offset, piece.into, most_bytes):
            yield Piece(offset, into, piece.tensor, piece.request_bytes)


def cut_range(offset: int, view: memoryview, most_bytes: int, unit: int = CUT_BYTES) -> list[tuple[int, memoryview]]:
    """A range of a file in requests of `most_bytes`, at most `unit` more, that end at multiples of `unit` of the file.

    The allowance keeps a part that is as long as a request, but begins between two blocks, from leaving a rest of a few
    bytes: that would cost a read of its own.
    """
    requests = []
    while view.nbytes > most_bytes + unit:
        take = _first_bytes(offset, most_bytes, unit)
        requests.append((offset, view[:take]))
        offset, view = offset + take, view[take:]
    requests.append((offset, view))
    return requests


def _first_bytes(offset: int, most_bytes: int, unit: int) -> int:
    """How much of a longer range one request takes: it ends at a multiple of `unit`, where there is one."""
    end = (offset + most_bytes) // unit * unit
    return end - offset if end > offset else most_bytes


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
        file.read_into(piece.offset, piece.into, tensor=piece.tensor, request_bytes=piece.request_bytes)
    except CheckpointError as error:
        if not (isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO):
            raise
        file.read_into(piece.offset, piece.into, tensor=piece.tensor, request_bytes=piece.request_bytes)
