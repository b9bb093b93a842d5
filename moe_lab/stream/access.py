"""How a model's files are read: past the page cache, through it and out again, or through it.

    direct    O_DIRECT windows (`direct`): the least processor time, nothing of others pushed out of memory
    dropped   through the page cache, whose copy is given back after each read: what direct is where that is refused
    buffered  through the page cache, which keeps it: a second pass may come from memory and says nothing of the disk
    auto      direct where the file system serves it and reads are large enough to gain by it, else dropped

What was taken is `io_mode`; it stands in a cache's repr and in every record of a measurement.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, get_args

from moe_lab.checkpoint.rawfile import MAX_READ_BYTES, FileIdentity, RawFile, ReadCall
from moe_lab.errors import CheckpointError, LabError
from moe_lab.stream.direct import DirectFile
from moe_lab.stream.joined import JoinedFiles, Readable
from moe_lab.stream.memory import PAGE_BYTES

IoMode = Literal["auto", "direct", "dropped", "buffered"]
IO_MODES: tuple[IoMode, ...] = get_args(IoMode)
# Below it the page cache's read-ahead wins: three parts of 60 bytes took 0.22 ms through it, 0.68 ms past it.
SMALL_READ_BYTES = 64 << 10
_serves_direct: dict[int, bool] = {}  # by device number: a file system does not change its mind


def check_io(io: str) -> None:
    """LabError for a name that is no way to read."""
    if io not in IO_MODES:
        raise LabError(f"io={io!r}; wanted {', '.join(IO_MODES)}.")


class DroppedFile(RawFile):
    """A RawFile that gives back what each read left in the page cache: else a long run would evict everybody else."""

    io_mode = "dropped"

    def read_into(
        self, offset: int, view: memoryview, *, tensor: str | None = None, request_bytes: int = MAX_READ_BYTES
    ) -> None:
        """As RawFile's. Pages that the range shares with a neighbour stay."""
        super().read_into(offset, view, tensor=tensor, request_bytes=request_bytes)
        first = -(-offset // PAGE_BYTES) * PAGE_BYTES
        last = (offset + view.nbytes) // PAGE_BYTES * PAGE_BYTES
        if last > first:
            os.posix_fadvise(self.fd, first, last - first, os.POSIX_FADV_DONTNEED)


def open_files(
    identities: Mapping[Path, FileIdentity], io: IoMode = "auto", call: ReadCall | None = None, *, usual_bytes: int = 0
) -> Readable:
    """Descriptors of its own on every file, joined where there are several. `call` stands in for `os.preadv`;
    `usual_bytes`: how much one read mostly wants (0: unknown, taken for large).

    CheckpointError "changed" when one is not the file of `identities` any more, "unreadable" where `io` is "direct" and
    the file system refuses it.
    """
    check_io(io)
    files: list[RawFile] = []
    try:
        for path, identity in identities.items():
            files.append(_opener(_settled(path, io, call, usual_bytes), call)(path))
            if files[-1].identity != identity:
                raise CheckpointError(
                    path, "changed", "the file changed since its header was read. Open the model again.",
                    seen=files[-1].identity, wanted=identity,
                )  # fmt: skip
    except BaseException:
        for file in files:
            file.close()
        raise
    return files[0] if len(files) == 1 else JoinedFiles(files)


def _settled(path: Path, io: IoMode, call: ReadCall | None, usual_bytes: int) -> IoMode:
    """What "auto" comes to for this file."""
    if io != "auto":
        return io
    if call is not None:  # what stands in for the system's call need not know of alignment
        return "buffered"
    if (not usual_bytes or usual_bytes >= SMALL_READ_BYTES) and serves_direct(path):
        return "direct"
    return "dropped" if hasattr(os, "posix_fadvise") else "buffered"


def _opener(io: IoMode, call: ReadCall | None) -> Callable[[Path], RawFile]:
    kinds: dict[str, type[RawFile]] = {"direct": DirectFile, "dropped": DroppedFile, "buffered": RawFile}
    kind = kinds[io]
    return kind if call is None else lambda where: kind(where, call)


def serves_direct(path: Path) -> bool:
    """Whether a direct read of this file's first block works; asked once for each file system."""
    plain = RawFile(path)
    plain.close()
    device = plain.identity.device
    if device not in _serves_direct:
        try:
            file = DirectFile(path)
            try:
                file.read_into(0, memoryview(bytearray(min(1, file.size))))
            finally:
                file.close()
            _serves_direct[device] = True
        except CheckpointError:
            _serves_direct[device] = False
    return _serves_direct[device]
