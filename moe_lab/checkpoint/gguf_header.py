"""The header of a GGUF file: metadata and tensor table, every byte checked against the file.

Layout (little endian): magic "GGUF", version u32, tensor count u64, metadata count u64, the metadata, the tensor table
(name, dimension count u32, dimensions u64 fastest first, type u32, offset u64 from the start of the data), padding to
`general.alignment`, data. Versions 2 and 3 share it. Sizes are exact Python integers, so nothing wraps.
Needs neither torch nor the tensor data: a header of a file of any size is read in milliseconds.
"""

import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_lab.checkpoint.ggml_types import GGML_TYPES
from moe_lab.checkpoint.gguf_values import Value, read_metadata
from moe_lab.checkpoint.header_bytes import MAX_ENTRIES, HeaderReader, shown
from moe_lab.checkpoint.looks_like import looks_like
from moe_lab.checkpoint.rawfile import RawFile
from moe_lab.checkpoint.tensor_info import TensorInfo
from moe_lab.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NAME_BYTES = 1024
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20  # larger ones are powers of two as well, but only serve to overflow a reader's padding
_UINT32, _INT32 = 4, 5
_TAIL_BYTES = 96


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF says about itself. `data_start` is also the header's length with its padding."""

    version: int
    alignment: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data_start: int


def read_header(file: RawFile) -> GgufHeader:
    """Read and check the header. CheckpointError for anything that does not add up."""
    reader = HeaderReader(file)
    _check_magic(reader)
    version = _read_version(reader)
    tensor_count, entry_count = reader.u64("the tensor count"), reader.u64("the metadata count")
    metadata = read_metadata(reader, entry_count)
    alignment = _alignment(reader, metadata.get("general.alignment"))
    table = _read_table(reader, tensor_count, alignment)
    data_start = -(-reader.position // alignment) * alignment
    tensors = {t.name: replace(t, offset=data_start + t.offset) for t in table}
    _check_layout(file, tensors.values())
    if tensors:
        _check_padding(reader, data_start)
        _check_tail(file, tensors.values())
    return GgufHeader(version, alignment, {key: v.value for key, v in metadata.items()}, tensors, data_start)


def _check_magic(reader: HeaderReader) -> None:
    if reader.left < len(MAGIC):
        head = reader.take(reader.left, "the magic")
        if MAGIC.startswith(head):
            reader.fail(
                "truncated",
                f"cut short: the file ends at byte {len(head)}, inside the four bytes of its magic.",
                seen=len(head),
            )
    else:
        head = reader.take(len(MAGIC), "the magic")
        if head == MAGIC:
            return
        head += reader.take(min(60, reader.left), "the first bytes")
    begins = repr(head[:4])[1:]
    reader.fail(
        "magic", f"begins with {begins}{looks_like(head)}; a GGUF file begins with 'GGUF'.", seen=head[:4], wanted=MAGIC
    )


def _read_version(reader: HeaderReader) -> int:
    version = reader.u32("the version")
    if version in VERSIONS:
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    hint = " (it was written on a big-endian machine: convert it)" if swapped in VERSIONS else ""
    reader.fail(
        "version", f"GGUF version {version}{hint}; this reader knows versions 2 and 3.", seen=version, wanted=VERSIONS
    )


def _alignment(reader: HeaderReader, stored: Value | None) -> int:
    if stored is None:
        return DEFAULT_ALIGNMENT
    # The format says uint32; some writers store a signed one, which means the same while it is positive.
    whole = stored.kind in (_UINT32, _INT32)
    if not whole or not 0 < stored.value <= MAX_ALIGNMENT or stored.value & (stored.value - 1):
        value = f"{reprlib.repr(stored.value)} (value type {stored.kind})"
        wanted = f"a uint32 power of two of at most {MAX_ALIGNMENT}"
        reader.fail(
            "alignment", f"general.alignment is {value}; it must be {wanted}.", seen=stored.value, wanted=wanted
        )
    return stored.value


def _read_table(reader: HeaderReader, count: int, alignment: int) -> list[TensorInfo]:
    reader.expect(count, 8 + 4 + 4 + 8, "tensors", MAX_ENTRIES, seen="the header")
    table, names = [], set()
    for index in range(count):
        name = reader.name(f"the name of tensor {index}", MAX_NAME_BYTES)
        if name in names:
            reader.fail("duplicate", "two tensors have this name.", tensor=name)
        names.add(name)
        table.append(_read_tensor(reader, name, alignment))
    return table


def _read_tensor(reader: HeaderReader, name: str, alignment: int) -> TensorInfo:
    dims = reader.u32(f"the dimension count of {shown(name)}")
    if dims > MAX_DIMS:
        reader.fail(
            "dimensions",
            f"has {dims} dimensions; at most {MAX_DIMS} are possible.",
            tensor=name,
            seen=dims,
            wanted=MAX_DIMS,
        )
    shape = tuple(reversed([reader.u64(f"the shape of {shown(name)}") for _ in range(dims)]))
    if any(not 0 < n < 1 << 63 for n in shape) or math.prod(shape) >= 1 << 63:
        reader.fail(
            "shape",
            f"the shape {list(shape)} is not possible: lengths and their product are 1 to 2^63 - 1.",
            tensor=name,
            seen=shape,
        )
    number, offset = reader.u32(f"the type of {shown(name)}"), reader.u64(f"the offset of {shown(name)}")
    if offset % alignment:
        reader.fail(
            "offset",
            f"starts at offset {offset}, no multiple of the alignment {alignment}.",
            tensor=name,
            seen=offset,
            wanted=alignment,
        )
    kind = GGML_TYPES.get(number)
    if kind is None:
        return TensorInfo(name, None, number, shape, None, offset, f"type {number}", reader.file.path)
    row = shape[-1] if shape else 1
    if row % kind.block:
        reader.fail(
            "row length",
            f"{kind.name} rows hold whole blocks of {kind.block} values, but a row has {row} (shape {list(shape)}).",
            tensor=name,
            seen=row,
            wanted=f"a multiple of {kind.block}",
        )
    nbytes = math.prod(shape) // kind.block * kind.block_bytes
    return TensorInfo(name, kind.name, number, shape, nbytes, offset, kind.name.upper(), reader.file.path)


def _check_layout(file: RawFile, tensors: Iterable[TensorInfo]) -> None:
    """Each tensor inside the file, none on its neighbour. A tensor of unknown type takes at least one byte."""
    before: TensorInfo | None = None
    before_end = 0
    for tensor in sorted(tensors, key=lambda t: t.offset):
        end = tensor.offset + (1 if tensor.nbytes is None else tensor.nbytes)
        if end > file.size:
            raise CheckpointError(
                file.path,
                "truncated",
                f"cut short: the tensor ends at byte {end}, but the file has only {file.size} bytes.",
                tensor=tensor.name,
                seen=file.size,
                wanted=end,
            )
        if before is not None and tensor.offset < before_end:
            raise CheckpointError(
                file.path,
                "overlap",
                f"starts at byte {tensor.offset}, inside the tensor {before.name!r} that ends at {before_end}.",
                tensor=tensor.name,
                seen=tensor.offset,
                wanted=before_end,
            )
        before, before_end = tensor, end


def _check_padding(reader: HeaderReader, data_start: int) -> None:
    """Zeros between header and data. A table that claims one row too few would leave that row here, and every tensor
    would be read from the wrong place (a fuzzed tensor count did that).
    """
    at = reader.position
    if any(reader.take(data_start - at, "the padding before the data")):
        reader.fail(
            "count",
            f"the {data_start - at} bytes between the header, which ends at byte {at}, and the data are not zero: the "
            "counts or the alignment are not those that the file was written with.",
            seen=at,
        )


def _check_tail(file: RawFile, tensors: Iterable[TensorInfo]) -> None:
    """Zeros after the last tensor, for the same reason; the first few tell. Nothing is known after an unknown type."""
    last = max(tensors, key=lambda t: t.offset)
    end = last.offset + (last.nbytes or 0)
    count = min(_TAIL_BYTES, file.size - end)
    if last.nbytes is None or count <= 0:
        return
    tail = bytearray(count)
    file.read_into(end, memoryview(tail))
    if any(tail):
        raise CheckpointError(
            file.path,
            "size",
            f"{file.size - end} bytes follow the last tensor, {last.name!r}, which ends at byte {end}, and they are "
            "not zero: they belong to no tensor.",
            seen=file.size,
            wanted=end,
        )
