"""A regular file held open for reading: its identity at opening, and exact positional reads.

Reads go through `preadv`, never through a memory map: a map of a file that shrinks ends the process with a bus error,
a read that comes back short is an ordinary exception.
"""

import os
import stat
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_lab.errors import CheckpointError

# Linux moves at most 2^31 - 4096 bytes a call and macOS refuses more than 2^31 - 1; 1 GiB is below both.
MAX_READ_BYTES = 1 << 30

ReadCall = Callable[[int, Sequence[memoryview], int], int]


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells one state of a file from another without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileIdentity":
        """The identity that a stat result shows."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class RawFile:
    """A read-only descriptor on a regular file, closed with `close()` or with the object.

    `read_call` stands in for `os.preadv` in fault tests. `io_mode`: how it reads, here through the page cache.
    """

    io_mode = "buffered"

    def __init__(self, path: str | os.PathLike[str], read_call: ReadCall = os.preadv) -> None:
        self.path = Path(path)
        self._read_call = read_call
        self._fd = _open_regular(self.path)
        self._close = weakref.finalize(self, os.close, self._fd)
        self.identity = FileIdentity.of(os.fstat(self._fd))

    @property
    def size(self) -> int:
        """Bytes in the file when it was opened."""
        return self.identity.size

    @property
    def fd(self) -> int:
        """The descriptor. CheckpointError after `close`: its number may be another file's by then."""
        if not self._close.alive:
            raise CheckpointError(self.path, "unreadable", "the file was closed. Open the model again.")
        return self._fd

    def close(self) -> None:
        """Give the descriptor back; a second call does nothing."""
        self._close()

    def read_into(
        self, offset: int, view: memoryview, *, tensor: str | None = None, request_bytes: int = MAX_READ_BYTES
    ) -> None:
        """Fill `view` (bytes) from `offset`, looping over short reads; at most `request_bytes` a call of the system's.

        CheckpointError when the file ends first.
        """
        done, wanted, most = 0, view.nbytes, min(request_bytes, MAX_READ_BYTES)
        while done < wanted:
            try:
                got = self._read_call(self.fd, [view[done : done + most]], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                raise self._unreadable(error, offset + done, tensor) from error
            if got <= 0:
                raise self._cut_short(offset, wanted, done, tensor)
            done += got
        self.check_unchanged(tensor=tensor)  # bytes of a file overwritten meanwhile belong to no model

    def check_unchanged(self, *, path_too: bool = False, tensor: str | None = None) -> None:
        """CheckpointError "changed" when the open file's size or time moved since opening.

        `path_too`: also when the path now names another file (a reader that opens the path anew would get that one).
        """
        status, known = os.fstat(self.fd), self.identity
        if status.st_mtime_ns == known.mtime_ns and status.st_size == known.size and not path_too:
            return  # after each read of an expert: a descriptor's device and inode never change
        now = FileIdentity.of(status)
        if now == self.identity and path_too:
            try:
                now = FileIdentity.of(self.path.stat())
            except OSError as error:
                raise self._unreadable(error, 0, tensor) from error
        if now != self.identity:
            raise CheckpointError(
                self.path,
                "changed",
                f"the file changed since it was opened ({_difference(self.identity, now)}). Open it again.",
                tensor=tensor,
                seen=now,
                wanted=self.identity,
            )

    def _cut_short(self, offset: int, wanted: int, done: int, tensor: str | None) -> CheckpointError:
        """The file ended early: what to raise. Raises "changed" itself where that is why."""
        self.check_unchanged(tensor=tensor)
        return CheckpointError(
            self.path, "truncated",
            f"cut short at byte {offset + done}: {wanted} bytes wanted from byte {offset}, {done} came.",
            tensor=tensor, seen=done, wanted=wanted,
        )  # fmt: skip

    def _unreadable(self, error: OSError, offset: int, tensor: str | None) -> CheckpointError:
        return CheckpointError(
            self.path, "unreadable", f"reading at byte {offset} failed: {error.strerror or error}.", tensor=tensor
        )


def _open_regular(path: Path) -> int:
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer that may never come.
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError as error:
        raise CheckpointError(path, "not found", "there is no such file. Check the path.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            path, "unreadable", f"cannot be opened: {getattr(error, 'strerror', None) or error}."
        ) from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = "a folder" if stat.S_ISDIR(mode) else "a device, pipe or socket"
        raise CheckpointError(path, "unreadable", f"is {kind}, not a file.", seen=kind, wanted="a regular file")
    return fd


def _difference(old: FileIdentity, new: FileIdentity) -> str:
    if (old.device, old.inode) != (new.device, new.inode):
        return "another file has its name now"
    if old.size != new.size:
        return f"{old.size} bytes then, {new.size} now"
    return "same size, later modification time"
