"""A bounded reader over a file's header: never past the end, never more memory than the bytes that are there.

It reads forward through a window of at most 256 KiB (or one item, if that is longer) and so never touches the tensor
data behind the header, whatever the file's size.
"""

import struct
from typing import NoReturn

from moe_lab.checkpoint.rawfile import RawFile
from moe_lab.errors import CheckpointError

# The largest headers in use (vocabularies of 262,144 with their merges) take under 20 MB and a million elements.
MAX_HEADER_BYTES = 64 << 20
MAX_TEXT_BYTES = 16 << 20
MAX_ENTRIES = 1 << 18
MAX_ELEMENTS = 1 << 22
_WINDOW = 256 << 10

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def shown(text: str, limit: int = 80) -> str:
    """Text out of an untrusted file as it may stand in a message: quoted, escaped, cut."""
    return repr(text if len(text) <= limit else text[:limit] + "...")


class HeaderReader:
    """Reads little-endian items from the start of `file`; every failure is a CheckpointError."""

    def __init__(self, file: RawFile) -> None:
        self.file = file
        self.position = 0
        self.elements = 0
        self._window, self._start = b"", 0

    @property
    def left(self) -> int:
        """Bytes between here and the end of the file."""
        return self.file.size - self.position

    def fail(
        self, reason: str, message: str, *, tensor: str | None = None, seen: object = None, wanted: object = None
    ) -> NoReturn:
        """Raise CheckpointError for this file."""
        raise CheckpointError(self.file.path, reason, message, tensor=tensor, seen=seen, wanted=wanted)

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes. "truncated" when the file ends first, "count" beyond the header limit."""
        begin = self.position - self._start
        end = begin + count
        if end > len(self._window):
            self._refill(count, what)
            begin, end = 0, count
        self.position += count
        return self._window[begin:end]

    def u32(self, what: str) -> int:
        """An unsigned 32-bit integer."""
        return _U32.unpack(self.take(4, what))[0]

    def u64(self, what: str) -> int:
        """An unsigned 64-bit integer."""
        return _U64.unpack(self.take(8, what))[0]

    def name(self, what: str, limit: int) -> str:
        """A length-prefixed key or tensor name: at most `limit` bytes of UTF-8, else "text"."""
        length = self._length(what, limit)
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            self.fail("text", f"{what} at byte {self.position - length} is not UTF-8 ({error.reason}).")

    def string(self, what: str) -> str:
        """A length-prefixed value. Bytes that are not UTF-8 become \\xNN: vocabularies hold parts of characters."""
        return self.take(self._length(what, MAX_TEXT_BYTES), what).decode(errors="backslashreplace")

    def strings(self, count: int, what: str) -> list[str]:
        """`count` values as `string` reads them, without a call for each (vocabularies have hundreds of thousands)."""
        out: list[str] = []
        unpack, add = _U64.unpack_from, out.append
        while len(out) < count:
            window, at = self._window, self.position - self._start
            limit = len(window) - 8
            for _ in range(count - len(out)):
                if at > limit:
                    break
                begin = at + 8
                end = begin + unpack(window, at)[0]
                if end > len(window):
                    break
                add(window[begin:end].decode(errors="backslashreplace"))
                at = end
            self.position = self._start + at
            if len(out) < count:
                add(self.string(what))
        return out

    def expect(self, count: int, each: int, what: str, limit: int, *, seen: str) -> None:
        """Check a count the file claims before anything is made for it: `count` items of at least `each` bytes.

        Beyond `limit` no header in use has so many: "count". Otherwise too few bytes left mean a cut: "truncated".
        """
        least = count * each
        if count > limit:
            message = (
                f"{seen} claims {count} {what} (at least {least} bytes; {self.left} are left, the limit is {limit})."
            )
            self.fail("count", message, seen=count, wanted=f"at most {limit}")
        if least > self.left:
            self._cut(f"{count} {what} of {seen}", least)

    def expect_elements(self, count: int, each: int, key: str) -> None:
        """`expect` for an array, counted against the one allowance that all arrays of the header share."""
        self.expect(count, each, "elements", MAX_ELEMENTS - self.elements, seen=f"the array under {shown(key)}")
        self.elements += count

    def _length(self, what: str, limit: int) -> int:
        length = self.u64(f"the length of {what}")
        if limit < length <= self.left:
            self.fail(
                "text", f"{what} is {length} bytes long; at most {limit} are accepted.", seen=length, wanted=limit
            )
        return length

    def _refill(self, count: int, what: str) -> None:
        if count > self.left:
            self._cut(what, count)
        if self.position + count > MAX_HEADER_BYTES:
            self.fail(
                "count",
                f"{what} takes the header beyond {MAX_HEADER_BYTES} bytes, more than any model needs.",
                seen=self.position + count,
                wanted=f"at most {MAX_HEADER_BYTES}",
            )
        window = bytearray(min(self.left, max(count, _WINDOW)))
        self.file.read_into(self.position, memoryview(window))
        self._window, self._start = bytes(window), self.position

    def _cut(self, what: str, wanted: int) -> NoReturn:
        self.fail(
            "truncated",
            f"cut short at byte {self.file.size}, its end: {what} wants {wanted} bytes from byte {self.position}.",
            seen=self.left,
            wanted=wanted,
        )
