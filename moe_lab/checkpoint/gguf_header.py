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
from moe_lab.checkpoint.rawfile import RawFile
from moe_lab.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NAME_BYTES = 1024
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20  # larger ones are powers of two as well, but only serve to overflow a reader's padding
_UINT32, _INT32 = 4, 5

# How things that are no GGUF begin, and what to call them.
_LOOKS_LIKE = (
    (b"version https://git-lfs", "a large-file pointer in place of the weights: fetch the file itself"),
    (b"<", "a web page"), (b"PK\x03\x04", "a zip archive (PyTorch writes those)"), (b"\x1f\x8b", "gzip data"),
    (b"ggml", "an older container of the same makers"), (b"lmgg", "an older container of the same makers"),
    (b"tjgg", "an older container of the same makers"), (b"GGML", "an older container of the same makers"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table. `shape` is in numpy order; `offset` counts from the start of the file.

    `format` is the type's name and `nbytes` its size, both None when the number `ggml_type` is unknown or withdrawn.
    """

    name: str
    format: str | None
    ggml_type: int
    shape: tuple[int, ...]
    nbytes: int | None
    offset: int


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
    return GgufHeader(version, alignment, {key: v.value for key, v in metadata.items()}, tensors, data_start)


def looks_like(head: bytes) -> str:
    """A short guess at what a file that is no GGUF may be: ", which looks like a web page", or nothing."""
    if len(head) > 8 and head[8:9] == b"{":
        return ", which looks like a safetensors file"
    return next((f", which looks like {what}" for start, what in _LOOKS_LIKE if head.lstrip().startswith(start)), "")


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
        return TensorInfo(name, None, number, shape, None, offset)
    row = shape[-1] if shape else 1
    if row % kind.block:
        reader.fail(
            "row length",
            f"{kind.name} rows hold whole blocks of {kind.block} values, but a row has {row} (shape {list(shape)}).",
            tensor=name,
            seen=row,
            wanted=f"a multiple of {kind.block}",
        )
    return TensorInfo(name, kind.name, number, shape, math.prod(shape) // kind.block * kind.block_bytes, offset)


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
