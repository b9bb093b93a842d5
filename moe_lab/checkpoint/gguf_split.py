"""A GGUF model split over several files, `<name>-00001-of-00003.gguf`: finding the parts and checking that they agree.

Each part is a whole GGUF with keys split.no (from 0), split.count and split.tensors.count; the first has the model's
metadata. Any part stands for the model.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moe_lab.checkpoint.gguf_header import GgufHeader, read_header
from moe_lab.checkpoint.places import locate, refuse_missing
from moe_lab.checkpoint.rawfile import RawFile, ReadCall
from moe_lab.checkpoint.tensor_info import TensorInfo
from moe_lab.errors import CheckpointError

MAX_PARTS = 4096
_NAME = re.compile(r"(.*-)(\d{5})(-of-\d{5}\.gguf)", re.DOTALL)


class Part(NamedTuple):
    """One open part and its header."""

    file: RawFile
    header: GgufHeader


def first_parts(names: Iterable[str]) -> list[str]:
    """`names` with each split model shown by its first part alone, or by the first one that is there."""
    found: dict[str, str] = {}
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        found.setdefault(match[1] + match[3] if match else name, name)
    return list(found.values())


def open_parts(given: Part, read_call: ReadCall) -> list[Part]:
    """All parts in order, `given` among them. Closes what it opened when it fails; CheckpointError "missing part" when
    files are missing, "part mismatch" when they do not belong together.
    """
    count, number = _split_of(given)
    if count == 1:
        return [given]
    opened: dict[int, Part] = {number: given}
    try:
        for sister, path in _sisters(given.file.path, number, count).items():
            file = RawFile(path, read_call)
            try:
                opened[sister] = Part(file, read_header(file))
            except BaseException:
                file.close()
                raise
        parts = [opened[n] for n in range(count)]
        _check_agreement(parts)
    except BaseException:
        for part in opened.values():
            if part is not given:
                part.file.close()
        raise
    return parts


def merged_tensors(parts: list[Part]) -> Mapping[str, TensorInfo]:
    """The tensors of all parts. CheckpointError "duplicate" when two parts have one name."""
    if len(parts) == 1:
        return parts[0].header.tensors
    found: dict[str, TensorInfo] = {}
    for part in parts:
        for name, info in part.header.tensors.items():
            if name in found:
                what = f"is in {found[name].file.name!r} too; parts of a model share no tensor."
                raise CheckpointError(part.file.path, "duplicate", what, tensor=name)
            found[name] = info
    return found


def _split_of(part: Part) -> tuple[int, int]:
    """(parts, this one's number from 0); (1, 0) for a model in one file."""
    metadata = part.header.metadata
    count, number = metadata.get("split.count", 1), metadata.get("split.no", 0)
    whole = type(count) is int and type(number) is int
    if whole and count in (0, 1):
        return 1, 0
    if not whole or not 0 <= number < count <= MAX_PARTS:
        what = f"says that it is part {_text(number)} (from 0) of {_text(count)}; at most {MAX_PARTS} parts are read."
        raise CheckpointError(part.file.path, "part mismatch", what, seen=(number, count))
    return count, number


def _sisters(path: Path, number: int, count: int) -> dict[int, Path]:
    what = f"is part {number + 1} of {count}"
    others = [n for n in range(count) if n != number]
    named = _NAME.fullmatch(path.name)
    if named is None:
        rule = "their names end in -00001-of-00003.gguf and the like, this one's does not"
        refuse_missing(path, [f"part {n + 1}" for n in others], f"{count} parts", f"{what} ({rule})")
    if int(named[2]) != number + 1:
        text = f"{what} by its metadata, which its name contradicts. Give it its own name back."
        raise CheckpointError(path, "part mismatch", text, seen=path.name, wanted=f"part {number + 1}")
    names = {f"{named[1]}{n + 1:05d}{named[3]}": n for n in others}
    return {names[name]: place for name, place in locate(path, path.parent, names, what=what).items()}


def _check_agreement(parts: list[Part]) -> None:
    first = parts[0].header.metadata
    for number, part in enumerate(parts):
        metadata = part.header.metadata
        if _split_of(part) != (len(parts), number):
            no, count = _text(metadata.get("split.no")), _text(metadata.get("split.count"))
            _mismatch(part, f"stands for part {number + 1} of {len(parts)}, but says split.no {no} of {count}")
        for key in ("general.architecture", "split.tensors.count"):
            if key in metadata and key in first and metadata[key] != first[key]:
                _mismatch(part, f"has {key} {_text(metadata[key])}, part 1 has {_text(first[key])}")
    stated, found = first.get("split.tensors.count"), sum(len(part.header.tensors) for part in parts)
    if stated is not None and stated != found:
        _mismatch(parts[0], f"promises {_text(stated)} tensors in all parts, which have {found}")


def _mismatch(part: Part, what: str) -> None:
    raise CheckpointError(part.file.path, "part mismatch", f"{what}: these are not the parts of one model.")


def _text(value: Any) -> str:
    return repr(value)[:80]
