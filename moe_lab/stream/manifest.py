"""The head of a packed file of experts: what it holds, where, and checksums; written by `pack`, read without trust.

    8 bytes  "MOELABX1"
    8 bytes  length of the manifest, little-endian
    JSON     {"version", "model_hash", "model_name", "order", "layers": {number: layer}}, UTF-8, without spaces
    zeros    to a multiple of 4096
    rows     one for each (layer, expert), each at a multiple of 4096

A layer: {"experts", "row_bytes", "parts", "offsets", "crc32", "sha256"}. A row lies as an expert lies in a cache slot
(`geometry`): its parts at multiples of 256 bytes, zeros between, then zeros to a multiple of 4096; row_bytes is without
those. `crc32` is of row_bytes bytes; `sha256` of the parts' bytes alone, which are the model file's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_lab.checkpoint.expert_slice import Beside, ExpertSlice
from moe_lab.checkpoint.header_bytes import shown
from moe_lab.checkpoint.rawfile import RawFile
from moe_lab.checkpoint.strict_json import BadJson, parse_json
from moe_lab.errors import CheckpointError, LabError
from moe_lab.formats import get_format
from moe_lab.stream.geometry import LayerGeometry, Run
from moe_lab.stream.memory import whole_pages

MAGIC = b"MOELABX1"
VERSION = 1
MOST_BYTES = 64 << 20  # a row takes about 100: far beyond any model
_MOST = 1 << 31  # rows, columns, experts
_DTYPES = {str(t).removeprefix("torch."): t for t in (torch.uint8, torch.float16, torch.bfloat16, torch.float32)}


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer's rows: `slices` as the parts lie in them, where each row begins, and its checksums."""

    slices: tuple[ExpertSlice, ...]
    row_bytes: int
    offsets: tuple[int, ...]
    crc32: tuple[int, ...]
    sha256: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of it. `rows_start`: the first byte behind the head."""

    model_hash: str
    model_name: str
    order: str
    layers: Mapping[int, PackedLayer]
    rows_start: int


def describe(geometry: LayerGeometry) -> list[dict[str, Any]]:
    """A layer's parts as the manifest holds them."""
    names = {run.part.slot_offset: run.name for run in geometry.runs}
    return [
        {
            "tensor": names[part.slot_offset], "format": part.format, "shape": list(part.shape),
            "beside": [
                {
                    "field": side.field, "tensor": names[side.slot_offset], "shape": list(side.shape),
                    "dtype": str(side.dtype).removeprefix("torch."),
                }
                for side in part.beside
            ],
        }
        for part in geometry.parts
    ]  # fmt: skip


def head_bytes(value: Mapping[str, Any]) -> bytes:
    """The head of a file with this manifest, zeros included."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
    head = MAGIC + len(text).to_bytes(8, "little") + text
    return head + bytes(whole_pages(len(head)) - len(head))


def read_manifest(file: RawFile) -> Manifest:
    """The manifest of an open packed file, everything checked against the file. CheckpointError: "magic", "truncated",
    "manifest".
    """
    start = _bytes(file, 0, min(16, file.size))
    if start[:8] != MAGIC:
        what = f"is no packed file of experts: it begins with {shown(start[:8].decode('latin-1'))}. See moe-lab pack."
        raise CheckpointError(file.path, "magic", what, seen=start[:8], wanted=MAGIC)
    length = int.from_bytes(start[8:16], "little")
    if len(start) < 16 or 16 + length > file.size:
        raise _cut(file, "its manifest", max(16, 16 + length))
    if length > MOST_BYTES:
        raise _bad(file, f"is {length} bytes long; at most {MOST_BYTES} are accepted")
    try:
        value = parse_json(_bytes(file, 16, length))
        return _manifest(file, value, whole_pages(16 + length))
    except BadJson as error:
        raise _bad(file, str(error).rstrip(".")) from error
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # LabErrors of formats and shapes among them
        raise _bad(file, f"does not describe experts ({type(error).__name__}: {shown(str(error))})") from error


def _manifest(file: RawFile, value: Any, rows_start: int) -> Manifest:
    if value["version"] != VERSION:
        raise _bad(file, f"is of version {str(value['version'])[:20]!s}; this one reads {VERSION}. Pack again")
    layers = {_whole(int(number), _MOST, 0): _layer(file, layer) for number, layer in value["layers"].items()}
    if not layers:
        raise _bad(file, "has no layers")
    spans = sorted((at, at + whole_pages(part.row_bytes)) for part in layers.values() for at in part.offsets)
    if spans and spans[-1][1] > file.size:
        raise _cut(file, "its last row", spans[-1][1])
    ends = [rows_start, *(end for _, end in spans)]
    for end, (begin, _) in zip(ends, spans, strict=False):
        if begin % 4096 or begin < end:
            raise _bad(file, f"puts a row at byte {begin}, where none can be (file: {file.size} bytes)")
    texts = {name: value[name] for name in ("model_hash", "model_name", "order")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise _bad(file, "has something else than text for the model's name or hash")
    return Manifest(**texts, layers=layers, rows_start=rows_start)


def _layer(file: RawFile, value: Any) -> PackedLayer:
    experts = _whole(value["experts"], 1 << 16, 1)
    offsets = tuple(_whole(at, _MOST) for at in value["offsets"])
    sums = tuple(_whole(crc, (1 << 32) - 1, 0) for crc in value["crc32"])
    digests = tuple(value["sha256"])
    if not len(offsets) == len(sums) == len(digests) == experts or not all(isinstance(d, str) for d in digests):
        raise _bad(file, f"has {len(offsets)} rows and {len(sums)} checksums for {experts} experts")
    slices = tuple(_slice(file.path, part, offsets) for part in value["parts"])
    return PackedLayer(slices, _whole(value["row_bytes"], _MOST), offsets, sums, digests)


def _slice(path: Path, value: Any, offsets: tuple[int, ...]) -> ExpertSlice:
    codec = get_format(_text(value["format"]))
    rows, columns = (_whole(n, _MOST) for n in value["shape"])
    places = tuple((path, at) for at in offsets)
    beside = tuple(
        Beside(
            _text(side["field"]), _text(side["tensor"]), _DTYPES[_text(side["dtype"])],
            (_whole(side["shape"][0], _MOST), _whole(side["shape"][1], _MOST)), places,
        )
        for side in value["beside"]
    )  # fmt: skip
    nbytes = rows * codec.row_bytes(columns)
    return ExpertSlice(_text(value["tensor"]), codec.name, nbytes, (len(offsets), rows, columns), places, beside)


def at_rows(geometry: LayerGeometry, offsets: tuple[int, ...]) -> tuple[Run, ...]:
    """The layer's runs where its rows begin at `offsets`: a part's place in the file follows its place in a slot."""
    return tuple(Run(run.part, run.name, tuple(at + run.part.slot_offset for at in offsets)) for run in geometry.runs)


def _whole(value: Any, most: int, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise LabError(f"{value!r} is no whole number from {least} to {most}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise LabError(f"{value!r} is no text")
    return value


def _bytes(file: RawFile, offset: int, count: int) -> bytes:
    data = bytearray(count)
    file.read_into(offset, memoryview(data))
    return bytes(data)


def _cut(file: RawFile, what: str, end: int) -> CheckpointError:
    told = f"is cut short: it has {file.size} bytes, {what} ends at byte {end}. Copy or pack it again."
    return CheckpointError(file.path, "truncated", told, seen=file.size, wanted=end)


def _bad(file: RawFile, what: str) -> CheckpointError:
    return CheckpointError(file.path, "manifest", f"its manifest {what}.")
