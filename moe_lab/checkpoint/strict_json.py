"""JSON out of untrusted files: UTF-8, no key twice, no deep nesting, no more items than the file can honestly need.

The text is measured before it is parsed, so that neither depth nor item count can exhaust the stack or the memory.
"""

import json
import re
from typing import Any, NoReturn

import numpy as np

from moe_lab.errors import LabError

MAX_DEPTH = 32
# A header of 130,000 tensors has about 1.3 million commas and brackets.
MAX_ITEMS = 1_500_000
_CHUNK = 1 << 20
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class BadJson(LabError):
    """What is wrong with the text, as the end of a sentence: "is not JSON: .."."""


def parse_json(data: bytes, *, max_depth: int = MAX_DEPTH) -> Any:
    """The value that `data` holds. BadJson for anything but one well-formed, shallow JSON text."""
    _measure(data, max_depth)
    surrogates = _SURROGATE.search(data) is not None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise BadJson(f"is not UTF-8 (byte {error.start}: {error.reason}).") from None
    del data
    try:
        return json.loads(
            text,
            object_pairs_hook=_checked if surrogates else _unique,
            parse_constant=_no_constant,
        )
    except BadJson:
        raise
    except (ValueError, RecursionError) as error:  # also a whole number of more digits than Python converts
        raise BadJson(f"is not JSON: {error}.") from None


def _measure(data: bytes, max_depth: int) -> None:
    """Depth and items from the structural characters outside strings, without recursion."""
    plain = data.replace(b"\\\\", b"  ").replace(b'\\"', b"  ") if b"\\" in data else data
    depth = items = parity = 0
    for start in range(0, len(plain), _CHUNK):
        chunk = np.frombuffer(plain, np.uint8, min(_CHUNK, len(plain) - start), start)
        inside = (np.cumsum(chunk == ord('"'), dtype=np.uint8) + np.uint8(parity)) & 1
        parity = int(inside[-1])
        outside = chunk[inside == 0]
        opens = np.isin(outside, np.frombuffer(b"[{", np.uint8))
        closes = np.isin(outside, np.frombuffer(b"]}", np.uint8))
        steps = opens.astype(np.int32) - closes
        deepest = depth + int(np.cumsum(steps[steps != 0]).max(initial=0))
        if deepest > max_depth:
            raise BadJson(f"nests lists and objects {deepest} deep or more; at most {max_depth} levels are accepted.")
        depth += int(steps.sum())
        items += int(opens.sum()) + int((outside == ord(",")).sum())
        if items > MAX_ITEMS:
            raise BadJson(f"holds more than {MAX_ITEMS} items, more than any model needs.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise BadJson(f"has the key {again[:80]!r} twice.")
    return found


def _checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`_unique`, and no half of a surrogate pair in a key or text: it could be neither printed nor hashed as UTF-8."""
    for text in (text for pair in pairs for text in pair if isinstance(text, str)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadJson(f"has a text with half a character: {text[:80]!r}.") from None
    return _unique(pairs)


def _no_constant(word: str) -> NoReturn:
    raise BadJson(f"holds {word}, which JSON does not know.")
