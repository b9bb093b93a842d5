"""Stack distances: how large an LRU would have to be for each request to hit, for all sizes in one pass.

The stack distance of a request for a key is the number of other keys asked for since its last one, before the present
request. An LRU of C slots hits exactly the requests of distance below C (Mattson, Gecsei, Slutz, Traiger, 1970), as
long as every request for several keys at once fits C slots.

With prev_i the place of the key's last use and s_i the place where the present request begins,
    distance_i = (s_i - prev_i - 1) - #{j < s_i : prev_j > prev_i}
(uses in between, less those that repeat a key of in between). The count is one of inversions, done by merging halves:
O(N log N) in numpy, whatever the number of keys.
"""

from collections.abc import Sequence

import numpy as np

from moe_lab.stream.policies.base import Key


def stack_distances(requests: Sequence[Sequence[Key]]) -> np.ndarray:
    """Distance of each key of each request, in order, float64 [N]; infinite for first uses."""
    last: dict[Key, int] = {}
    previous, begins = [], []
    for keys in requests:
        begin = len(previous)
        for key in keys:
            previous.append(last.get(key, -1))
            begins.append(begin)
        for place, key in enumerate(keys, begin):
            last[key] = place
    prev, start = np.array(previous, dtype=np.int64), np.array(begins, dtype=np.int64)
    # Within a request in ascending order of `prev`, so that no pair of one request counts as an inversion.
    order = np.lexsort((prev, start))
    larger = np.empty(len(prev), dtype=np.int64)
    larger[order] = _larger_before(prev[order])
    return np.where(prev < 0, np.inf, start - prev - 1 - larger)


def _larger_before(values: np.ndarray) -> np.ndarray:
    """#{j < i : values_j > values_i} for every i, int64 [N]; values in -1..N - 1."""
    count = len(values)
    size = 1 << max(count - 1, 0).bit_length()
    padded = np.concatenate([values, np.full(size - count, count + 1)])  # larger than any place: counted by nobody
    found = np.zeros(size, dtype=np.int64)
    at = np.arange(size)  # where each place of `padded` came from
    half = 1
    while half < size:
        blocks = size // (2 * half)
        left, right = padded.reshape(blocks, 2, half).transpose(1, 0, 2)
        # One search for all blocks: what is added for its number keeps each block's values among themselves.
        lift = (np.arange(blocks) * (count + 3))[:, None]
        smaller = np.searchsorted((left + lift).ravel(), (right + lift).ravel(), side="right")
        smaller = smaller.reshape(blocks, half) - np.arange(blocks)[:, None] * half
        found[at.reshape(blocks, 2, half)[:, 1]] += half - smaller
        merged = np.argsort(padded.reshape(blocks, 2 * half), axis=1, kind="stable")
        padded = np.take_along_axis(padded.reshape(blocks, 2 * half), merged, axis=1).ravel()
        at = np.take_along_axis(at.reshape(blocks, 2 * half), merged, axis=1).ravel()
        half *= 2
    return found[:count]
