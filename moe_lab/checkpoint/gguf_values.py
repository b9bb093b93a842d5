"""GGUF metadata: typed values, strings and arrays, checked as they are read.

A value is one type number and its bytes. Arrays carry their element type and a 64-bit count; arrays of arrays are
allowed up to a fixed depth, because each level costs the reader a frame.
"""

from typing import Any, NamedTuple

import numpy as np

from moe_lab.checkpoint.header_bytes import MAX_ENTRIES, HeaderReader, shown

MAX_DEPTH = 8
MAX_KEY_BYTES = 65535
BOOL, STRING, ARRAY = 7, 8, 9

# Value type number -> numpy dtype. Numbers and order are the format's.
_SCALARS: dict[int, np.dtype] = {
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8"),
}  # fmt: skip
# Fewest bytes an element can take: a length for a string, element type and count for an array.
_LEAST = {**{number: dtype.itemsize for number, dtype in _SCALARS.items()}, STRING: 8, ARRAY: 12}


class Value(NamedTuple):
    """A metadata value and the type number it was stored under."""

    kind: int
    value: Any


def read_metadata(reader: HeaderReader, count: int) -> dict[str, Value]:
    """`count` key-value pairs: int, float, bool, str or (nested) lists of them. Refuses a key that comes twice."""
    reader.expect(count, 8 + 4 + 1, "metadata entries", MAX_ENTRIES, seen="the header")
    found: dict[str, Value] = {}
    for index in range(count):
        key = reader.name(f"metadata key {index}", MAX_KEY_BYTES)
        if key in found:
            reader.fail("duplicate", f"the metadata key {shown(key)} is there twice.", seen=key)
        kind = reader.u32(f"the value type of {shown(key)}")
        found[key] = Value(kind, _read_value(reader, kind, key, depth=0))
    return found


def _read_value(reader: HeaderReader, kind: int, key: str, depth: int) -> Any:
    if kind == STRING:
        return reader.string(f"the text under {shown(key)}")
    if kind == ARRAY:
        return _read_array(reader, key, depth + 1)
    return _read_scalars(reader, kind, 1, key)[0]


def _read_array(reader: HeaderReader, key: str, depth: int) -> list[Any]:
    if depth > MAX_DEPTH:
        reader.fail(
            "nesting",
            f"the value under {shown(key)} nests arrays more than {MAX_DEPTH} deep.",
            seen=depth,
            wanted=MAX_DEPTH,
        )
    kind = reader.u32(f"the element type of {shown(key)}")
    _check_kind(reader, kind, key)
    count = reader.u64(f"the element count of {shown(key)}")
    reader.expect_elements(count, _LEAST[kind], key)
    if kind == STRING:
        return reader.strings(count, f"a text under {shown(key)}")
    if kind == ARRAY:
        return [_read_array(reader, key, depth + 1) for _ in range(count)]
    return _read_scalars(reader, kind, count, key)


def _read_scalars(reader: HeaderReader, kind: int, count: int, key: str) -> list[Any]:
    _check_kind(reader, kind, key)
    dtype = _SCALARS[kind]
    values = np.frombuffer(reader.take(count * dtype.itemsize, f"the value of {shown(key)}"), dtype)
    if kind != BOOL:
        return values.tolist()
    if values.size and values.max() > 1:
        reader.fail(
            "value",
            f"the bool under {shown(key)} is {values.max()}; only 0 and 1 are valid.",
            seen=int(values.max()),
            wanted="0 or 1",
        )
    return values.astype(bool).tolist()


def _check_kind(reader: HeaderReader, kind: int, key: str) -> None:
    if kind not in _LEAST:
        reader.fail(
            "value type",
            f"the value under {shown(key)} has the unknown type {kind}; known are 0 to 12.",
            seen=kind,
            wanted="0..12",
        )
