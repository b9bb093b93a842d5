"""Text out of the unpacked packages: one function a kind of file, each giving documents in a fixed order."""

import gzip
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

SYNSETS_PER_DOCUMENT = 64
_PARTS_OF_SPEECH = (("noun", "noun"), ("verb", "verb"), ("adj", "adj"), ("adv", "adv"))
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_BREAKS = frozenset(
    (*_HEADINGS, "article", "br", "dd", "div", "dl", "dt", "li", "ol", "p", "pre", "section", "table", "tr", "ul")
)
_SILENT = frozenset(("script", "style", "head", "nav"))


class _Text(HTMLParser):
    """Visible text with line breaks where the page has blocks."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.silent = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.silent += tag in _SILENT
        if tag in _BREAKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.silent -= tag in _SILENT and self.silent > 0
        if tag in _BREAKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.pieces.append(data)


def html_text(page: str) -> str:
    """Visible text, at most one empty line in a row, no spaces at line ends."""
    parser = _Text()
    parser.feed(page)
    lines = (line.strip() for line in "".join(parser.pieces).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _files(folders: list[Path], pattern: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(path for path in folder.rglob(pattern) if path.is_file() and not path.is_symlink())


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def _plain(pattern: str, unless: tuple[str, ...] = ()) -> Callable[[list[Path]], Iterator[str]]:
    def documents(folders: list[Path]) -> Iterator[str]:
        for path in _files(folders, pattern):
            if not set(unless) & set(path.parts):
                yield _decode(path.read_bytes())

    return documents


def _html(under: str) -> Callable[[list[Path]], Iterator[str]]:
    def documents(folders: list[Path]) -> Iterator[str]:
        for path in _files(folders, "*.html"):
            if under in path.parts:
                yield html_text(_decode(path.read_bytes()))

    return documents


def _pod(folders: list[Path]) -> Iterator[str]:
    yield from _plain("*.pod")(folders)
    for path in _files(folders, "*.pod.gz"):
        yield _decode(gzip.decompress(path.read_bytes()))


def _wordnet(folders: list[Path]) -> Iterator[str]:
    """`word, word (noun): gloss`, some dozens a document, in the order of the database (neighbours are related)."""
    for suffix, name in _PARTS_OF_SPEECH:
        lines = []
        for path in _files(folders, f"data.{suffix}"):
            for row in _decode(path.read_bytes()).splitlines():
                if row.startswith("  ") or " | " not in row:
                    continue
                data, gloss = row.split(" | ", 1)
                fields = data.split(" ")
                words = [fields[4 + 2 * i].replace("_", " ") for i in range(int(fields[3], 16))]
                lines.append(f"{', '.join(words)} ({name}): {gloss.strip()}")
        for start in range(0, len(lines), SYNSETS_PER_DOCUMENT):
            yield "\n".join(lines[start : start + SYNSETS_PER_DOCUMENT])


def _austen(folders: list[Path]) -> Iterator[str]:
    """The novels: character vectors in R's lazy-load database, a 4-byte length before each zlib stream."""
    for path in _files(folders, "Rdata.rdb"):
        data = path.read_bytes()
        while len(data) > 4:
            stream = zlib.decompressobj()
            chunk, data = stream.decompress(data[4:]), stream.unused_data
            if lines := _r_strings(chunk):
                yield "\n".join(lines)


def _r_strings(chunk: bytes) -> list[str]:
    """The elements of a serialised R character vector (XDR, version 2 or 3); [] for any other object."""
    if not chunk.startswith(b"X\n"):
        return []
    at, version = 14, struct.unpack(">i", chunk[2:6])[0]
    if version == 3:
        at += 4 + struct.unpack(">i", chunk[at : at + 4])[0]
    flags, count = struct.unpack(">ii", chunk[at : at + 8])
    if flags & 0xFF != 16:
        return []
    at, strings = at + 8, []
    for _ in range(count):
        size = max(0, struct.unpack(">i", chunk[at + 4 : at + 8])[0])
        strings.append(_decode(chunk[at + 8 : at + 8 + size]))
        at += 8 + size
    return strings


EXTRACTORS: dict[str, Callable[[list[Path]], Iterator[str]]] = {
    "pydoc_rst": _plain("*.rst.txt"),
    "py_stdlib": _plain("*.py", unless=("test", "tests", "idle_test", "config-3.11-x86_64-linux-gnu")),
    "perl_pod": _pod,
    "pg_doc": _html("html"),
    "lo_de": _html("de"),
    "lo_fr": _html("fr"),
    "wordnet": _wordnet,
    "austen": _austen,
}
"""Domain -> its documents, given the folders of its unpacked packages."""
