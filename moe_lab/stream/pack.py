"""Writing a packed file: every expert of a model as one aligned row, in one step, checksums and all.

In a model file an expert is three runs of bytes or more, each somewhere else and seldom where a disk's block begins. A
packed row is one direct read into the slot, without a copy; it costs the experts' bytes on disk a second time.
"""

import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from moe_lab.errors import LabError
from moe_lab.stream.joined import Readable
from moe_lab.stream.manifest import MAGIC, VERSION, describe, head_bytes
from moe_lab.stream.memory import host_block, whole_pages
from moe_lab.stream.packed import sha256_of
from moe_lab.stream.source import ExpertSource
from moe_lab.system.files import replace_file

Order = Mapping[int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Packed:
    """What was written: rows (experts), bytes of the file, and how long it took."""

    path: Path
    rows: int
    nbytes: int
    seconds: float


def pack(
    source: ExpertSource,
    path: str | os.PathLike[str],
    *,
    order: Order | None = None,
    order_name: str = "layer",
    told: Callable[[int, int], None] | None = None,
) -> Packed:
    """Write all experts of `source` to `path`, layer after layer; within a layer by `order`, else by number.

    `told(rows done, rows)` is called after each row. LabError, and nothing left behind, when an order is no permutation
    or the disk refuses; what stood at `path` stays until the new file is whole and on the disk, and for good, with a
    LabError, where it is no packed file: a model, a trace, somebody's notes.
    """
    _keep_others(Path(path))
    if source.model_hash is None:
        raise LabError(f"{source.path}: a packed file names its model by its hash, and this source has none.")
    rows = _row_order(source, order or {})
    begin = time.perf_counter()
    layers = {n: _describe_layer(source, n) for n in source.layers}
    value = {
        "version": VERSION, "model_hash": source.model_hash, "model_name": source.path.name, "order": order_name,
        "layers": layers,
    }  # fmt: skip
    end = _place(source, rows, layers, len(head_bytes(_named(value))))
    out = replace_file(Path(path), lambda part: _write(part, source, rows, value, end, told))
    return Packed(out, len(rows), end, time.perf_counter() - begin)


def _keep_others(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("rb") as file:
        head = file.read(len(MAGIC))
    if head != MAGIC:
        raise LabError(f"{path} exists and is no packed file (it begins {head!r}); name another, or remove it first.")


def _row_order(source: ExpertSource, order: Order) -> list[tuple[int, int]]:
    rows = []
    for layer in source.layers:
        count = source.num_experts(layer)
        mine = list(order.get(layer, range(count)))
        if sorted(mine) != list(range(count)):
            raise LabError(f"the order of layer {layer} names {len(mine)} experts, not each of its {count} once.")
        rows += [(layer, expert) for expert in mine]
    return rows


def _describe_layer(source: ExpertSource, layer: int) -> dict[str, Any]:
    """The layer's manifest with placeholders as wide as anything that will stand there."""
    count = source.num_experts(layer)
    return {
        "experts": count, "row_bytes": source.span_bytes(layer), "parts": describe(source.geometry(layer)),
        "offsets": [1 << 62] * count, "crc32": [0xFFFFFFFF] * count, "sha256": ["0" * 64] * count,
    }  # fmt: skip


def _named(value: Mapping[str, Any]) -> dict[str, Any]:
    return {**value, "layers": {str(number): layer for number, layer in value["layers"].items()}}


def _place(source: ExpertSource, rows: list[tuple[int, int]], layers: dict[int, dict[str, Any]], at: int) -> int:
    """Give each row its offset; the file's end."""
    for layer, expert in rows:
        layers[layer]["offsets"][expert] = at
        at += whole_pages(source.span_bytes(layer))
    return at


def _write(
    part: Path,
    source: ExpertSource,
    rows: list[tuple[int, int]],
    value: dict[str, Any],
    end: int,
    told: Callable[[int, int], None] | None,
) -> None:
    start = value["layers"][rows[0][0]]["offsets"][rows[0][1]]
    row = host_block(whole_pages(source.slot_bytes)).numpy().data
    reader = source.open()
    try:
        with open(part, "wb", buffering=0) as out:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(out.fileno(), 0, end)  # a disk that is too small says so now
            out.seek(start)
            for done, (layer, expert) in enumerate(rows, start=1):
                about = value["layers"][layer]
                view = _read_row(source, reader, layer, expert, row)
                about["crc32"][expert] = zlib.crc32(view[: about["row_bytes"]])
                about["sha256"][expert] = sha256_of(source.geometry(layer), view)
                _write_all(out, view)
                if told is not None:
                    told(done, len(rows))
            head = head_bytes(_named(value))
            out.seek(0)
            _write_all(out, memoryview(head + bytes(start - len(head))))
            os.fsync(out.fileno())
    finally:
        reader.close()


def _read_row(source: ExpertSource, reader: Readable, layer: int, expert: int, row: memoryview) -> memoryview:
    """One expert as it lies in a slot, zeros between and behind its parts."""
    view = row[: whole_pages(source.span_bytes(layer))]
    at = 0
    for segment in sorted(source.segments(layer, expert), key=lambda s: s.slot_offset):
        view[at : segment.slot_offset] = bytes(segment.slot_offset - at)
        at = segment.slot_offset + segment.nbytes
        reader.read_into(segment.file_offset, view[segment.slot_offset : at], tensor=segment.tensor)
    view[at:] = bytes(view.nbytes - at)
    return view


def _write_all(out: FileIO, data: memoryview) -> None:
    done = 0
    while done < data.nbytes:
        done += out.write(data[done:])
