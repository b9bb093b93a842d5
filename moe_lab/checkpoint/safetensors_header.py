"""The header of a safetensors file: JSON between an 8-byte length and the data, every tensor checked against the file.

Layout (little endian): header length u64, the header (an object: name -> {dtype, shape, data_offsets [begin, end)},
and `__metadata__`, text -> text), the data. Offsets count from the end of the header; the tensors tile the data without
holes, in any order of the names. Sizes are exact Python integers, so nothing wraps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from moe_lab.checkpoint.header_bytes import shown
from moe_lab.checkpoint.looks_like import looks_like
from moe_lab.checkpoint.plain_types import SAFETENSORS_TYPES
from moe_lab.checkpoint.rawfile import RawFile
from moe_lab.checkpoint.strict_json import BadJson, parse_json
from moe_lab.checkpoint.tensor_info import TensorInfo
from moe_lab.errors import CheckpointError

FORMAT_LIMIT = 100_000_000  # what the format allows; this reader stops earlier, at some 130,000 tensors a file
MAX_HEADER_BYTES = 16 << 20
MAX_NAME_BYTES = 1024
MAX_DIMS = 64
_LENGTH_BYTES, _METADATA = 8, "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What a file says about itself. `data_start` is also the bytes of the header with its length."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    data_start: int


def read_safetensors_header(file: RawFile) -> SafetensorsHeader:
    """Read and check the header. CheckpointError for anything that does not add up."""
    length = _header_length(file)
    header = _header_object(file, length)
    metadata = _metadata(file, header.pop(_METADATA, {}))
    start = _LENGTH_BYTES + length
    tensors = {name: _tensor(file, name, entry, start) for name, entry in header.items()}
    _check_tiling(file, tensors, start)
    return SafetensorsHeader(metadata, tensors, start)


def _header_length(file: RawFile) -> int:
    head = bytearray(min(file.size, 64))
    file.read_into(0, memoryview(head))
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    what = "its first 8 bytes, the header's length, say"
    if not head[_LENGTH_BYTES:].startswith(b"{"):
        what = f"is no safetensors file{looks_like(bytes(head))}: {what}"
    if len(head) < _LENGTH_BYTES:
        what = f"is no safetensors file: it has {len(head)} bytes, and one begins with 8 bytes of header length."
    elif length > file.size - _LENGTH_BYTES:
        what = f"{what} {length}, but {file.size - _LENGTH_BYTES} bytes follow."
    elif length > MAX_HEADER_BYTES:
        what = f"{what} {length}; the format allows {FORMAT_LIMIT}, this reader {MAX_HEADER_BYTES}."
    elif length < len("{}"):
        what = f"{what} {length}, too little for the smallest header, {{}}."
    else:
        return length
    raise CheckpointError(file.path, "header length", what, seen=length, wanted=f"2 to {MAX_HEADER_BYTES}")


def _header_object(file: RawFile, length: int) -> dict[str, Any]:
    data = bytearray(length)
    file.read_into(_LENGTH_BYTES, memoryview(data))
    if data[:1] != b"{":
        _bad_text(file, f"begins with {bytes(data[:8])!r}; the format wants '{{'.")
    try:
        header = parse_json(bytes(data))
    except BadJson as error:
        _bad_text(file, str(error))
    assert isinstance(header, dict)  # it begins with "{"
    return header


def _metadata(file: RawFile, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        _bad_text(file, f"has a {_METADATA} that does not map texts to texts.")
    return value


def _tensor(file: RawFile, name: str, entry: Any, start: int) -> TensorInfo:
    if not name or len(name.encode()) > MAX_NAME_BYTES:
        _bad_text(file, f"names a tensor {shown(name)}; names have 1 to {MAX_NAME_BYTES} bytes.")
    if not isinstance(entry, dict) or set(entry) != _FIELDS:
        has = f"the fields {shown(', '.join(entry))}" if isinstance(entry, dict) else "no fields"
        _bad_text(file, f"its entry has {has}; wanted exactly {', '.join(sorted(_FIELDS))}.", name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    kind = SAFETENSORS_TYPES.get(dtype) if isinstance(dtype, str) else None
    if kind is None:
        known = ", ".join(SAFETENSORS_TYPES)
        what = f"dtype {shown(str(dtype))} is not supported. Known: {known}."
        raise CheckpointError(file.path, "dtype", what, tensor=name, seen=dtype, wanted=known)
    nbytes = _nbytes(file, name, shape, kind.bits, dtype)
    begin = _begin(file, name, offsets, nbytes, start, shape, dtype)
    return TensorInfo(name, dtype.lower(), None, tuple(shape), nbytes, start + begin, dtype, file.path)


def _nbytes(file: RawFile, name: str, shape: Any, bits: int, dtype: str) -> int:
    def refuse(what: str) -> NoReturn:
        raise CheckpointError(
            file.path, "shape", f"shape {shown(str(shape))} {what}.", tensor=name, seen=shown(str(shape))
        )

    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        refuse(f"is no list of at most {MAX_DIMS} lengths")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
        refuse("is not possible: lengths are whole numbers, 0 to 2^63 - 1")
    total = math.prod(shape) * bits
    if total >= 1 << 66:
        refuse(f"of {dtype} is not possible: it takes more than 2^63 - 1 bytes")
    if total % 8:
        refuse(f"of {dtype} ends inside a byte: {math.prod(shape)} elements of {bits} bits")
    return total // 8


def _begin(file: RawFile, name: str, offsets: Any, nbytes: int, start: int, shape: list[int], dtype: str) -> int:
    """Where the tensor begins in the data, its offsets checked against shape and file."""
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        what = f"data_offsets {shown(str(offsets))} are not two whole numbers."
        raise CheckpointError(file.path, "offset", what, tensor=name, seen=shown(str(offsets)))
    begin, end = offsets
    space = file.size - start
    if not 0 <= begin <= end:
        what = f"data_offsets [{begin}, {end}]: wanted 0 <= begin <= end."
    elif end > space:
        what = f"data_offsets [{begin}, {end}] end past the data, which has {space} bytes: the file is cut short."
    elif end - begin != nbytes:
        what = f"shape {shape} of {dtype} takes {nbytes} bytes, but data_offsets [{begin}, {end}] hold {end - begin}."
        raise CheckpointError(file.path, "size", what, tensor=name, seen=end - begin, wanted=nbytes)
    else:
        return begin
    raise CheckpointError(file.path, "offset", what, tensor=name, seen=[begin, end], wanted=f"within 0..{space}")


def _check_tiling(file: RawFile, tensors: Mapping[str, TensorInfo], start: int) -> None:
    """The tensors cover the data, each byte once."""
    at, before = start, None
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset < at:
            what = f"starts at byte {tensor.offset}, inside the tensor {before!r} that ends at {at}."
            raise CheckpointError(file.path, "overlap", what, tensor=tensor.name, seen=tensor.offset, wanted=at)
        if tensor.offset > at:
            what = f"{tensor.offset - at} bytes before it, from byte {at} on, belong to no tensor."
            raise CheckpointError(
                file.path, "hole in the data", what, tensor=tensor.name, seen=tensor.offset, wanted=at
            )
        at, before = tensor.offset + (tensor.nbytes or 0), tensor.name
    if at != file.size:
        what = f"{file.size - at} bytes after the last tensor, which ends at byte {at}, belong to none."
        raise CheckpointError(file.path, "size", what, seen=file.size, wanted=at)


def _bad_text(file: RawFile, what: str, tensor: str | None = None) -> NoReturn:
    text = what if tensor is not None else f"its header {what}"
    raise CheckpointError(file.path, "header text", text, tensor=tensor)
