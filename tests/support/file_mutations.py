"""Ways to damage a file: bits, bytes, whole numbers, cuts, copies and, in JSON, tokens."""

import random
import re
import struct
from typing import NamedTuple

_LIMITS = (0, 1, 2, 31, 32, 255, 256, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 62) + 1,
           (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1)  # fmt: skip
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+|[\[\]{},:]')
_WORDS = (
    b"-1", b"0", b"1", b"9223372036854775808", b"18446744073709551617", b"1e3", b"4.5", b"null", b"true", b"NaN", b"[]",
    b"{}", b'""', b'"a"', b'"F4"', b'"F8_E8M0"', b'"I16"', b'"U8"', b'"BOOL"', b'"F9"', b'"../x"', b'"/etc/passwd"',
    b'"\\ud800"', b'"\\u0000"', b"[" * 40, b"[" * 3000, b'"dtype"', b'"weight_map"', b"9" * 5000, b'"\xc3"', b",", b":",
)  # fmt: skip


class Mutation(NamedTuple):
    """The damaged bytes; `first`: the first position that differs; `moved`: whether what follows it stands elsewhere.
    `last`: one past the last position that differs, when nothing moved."""

    data: bytes
    first: int
    last: int
    moved: bool
    kind: str


def mutate(rng: random.Random, data: bytes, head_end: int) -> Mutation:
    """Damage `data` once, mostly in its first `head_end` bytes. It may turn out equal to what it was."""
    kinds = [_flip, _byte, _number, _step, _step, _cut, _delete, _copy, _insert, _swap]
    if _TOKEN.search(data, 0, 64) and b"{" in data[:16]:
        kinds += [_token] * 8
    kind = rng.choice(kinds)
    limit = head_end if rng.random() < 0.85 else len(data)
    changed = kind(rng, data, max(1, min(limit, len(data))))
    same = min(len(data), len(changed))
    first = next((i for i in range(same) if data[i] != changed[i]), same)
    moved = len(changed) != len(data)
    last = len(data) if moved else next((i + 1 for i in reversed(range(len(data))) if data[i] != changed[i]), first)
    return Mutation(changed, first, last, moved, kind.__name__.strip("_"))


def _flip(rng: random.Random, data: bytes, limit: int) -> bytes:
    at = rng.randrange(limit)
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _byte(rng: random.Random, data: bytes, limit: int) -> bytes:
    at = rng.randrange(limit)
    return data[:at] + rng.randbytes(1) + data[at + 1 :]


def _number(rng: random.Random, data: bytes, limit: int) -> bytes:
    at, code = rng.randrange(limit), rng.choice(("<I", "<Q"))
    value = rng.choice((*_LIMITS, len(data), len(data) + 1, rng.getrandbits(16))) + rng.choice((0, 0, -1, 1))
    packed = struct.pack(code, value % (1 << 8 * struct.calcsize(code)))
    return data[:at] + packed[: len(data) - at] + data[at + len(packed) :]


def _step(rng: random.Random, data: bytes, limit: int) -> bytes:
    """A byte that is part of a whole number grows or shrinks a little; those at the front more often than others."""
    at = rng.randrange(min(limit, 24) if rng.random() < 0.2 else limit)
    return data[:at] + bytes([(data[at] + rng.choice((-16, -2, -1, 1, 2, 16))) % 256]) + data[at + 1 :]


def _cut(rng: random.Random, data: bytes, limit: int) -> bytes:
    return data[: rng.randrange(limit)] if rng.random() < 0.7 else data + rng.randbytes(rng.randrange(1, 64))


def _delete(rng: random.Random, data: bytes, limit: int) -> bytes:
    at = rng.randrange(limit)
    return data[:at] + data[at + rng.choice((1, 1, 4, 8, 32, 100)) :]


def _copy(rng: random.Random, data: bytes, limit: int) -> bytes:
    start, at = rng.randrange(limit), rng.randrange(limit)
    return data[:at] + data[start : start + rng.choice((1, 8, 24, 60, 200))] + data[at:]


def _insert(rng: random.Random, data: bytes, limit: int) -> bytes:
    at = rng.randrange(limit)
    return data[:at] + rng.choice((b"\0", b"\xff", b" ", rng.randbytes(8), bytes(32))) + data[at:]


def _swap(rng: random.Random, data: bytes, limit: int) -> bytes:
    """Two stretches of one length change places."""
    one, other = sorted((rng.randrange(limit), rng.randrange(limit)))
    n = min(rng.choice((1, 4, 8, 16)), other - one, len(data) - other)
    return data[:one] + data[other : other + n] + data[one + n : other] + data[one : one + n] + data[other + n :]


def _token(rng: random.Random, data: bytes, limit: int) -> bytes:
    """A JSON token becomes another one of the file, or a hostile word; mostly a safetensors length follows."""
    tokens = list(_TOKEN.finditer(data, 0, limit))
    if not tokens:
        return data
    old = rng.choice(tokens)
    new = rng.choice(_WORDS) if rng.random() < 0.5 else rng.choice(tokens).group()
    changed = data[: old.start()] + new + data[old.end() :]
    if data[8:9] == b"{" and len(changed) != len(data) and rng.random() < 0.7:
        length = int.from_bytes(data[:8], "little") + len(changed) - len(data)
        changed = struct.pack("<Q", length) + changed[8:]
    return changed
