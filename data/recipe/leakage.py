"""Is held-out text really new? Finds passages of a text that also occur in the training tokens.

A passage is PASSAGE tokens in a row. All passages of the training stream are hashed (64-bit polynomial, exact up to
collisions of about 1e-12), sorted once and looked up; 15 M tokens take 120 MB and some seconds.
"""

import numpy as np

PASSAGE = 24
_BASE = np.uint64(0x9E3779B97F4A7C15)


def passage_hashes(tokens: np.ndarray) -> np.ndarray:
    """uint64 [T - PASSAGE + 1], one a start position; empty for a shorter text."""
    count = tokens.size - PASSAGE + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    ids, hashes = tokens.astype(np.uint64) + np.uint64(1), np.zeros(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for at in range(PASSAGE):
            hashes = hashes * _BASE + ids[at : at + count]
            hashes ^= hashes >> np.uint64(29)
    return hashes


class SeenPassages:
    """The passages of a training stream."""

    def __init__(self, training: np.ndarray) -> None:
        self.hashes = np.sort(passage_hashes(training))

    def share(self, tokens: np.ndarray) -> float:
        """Part of the passages of `tokens` that the training stream holds too (0 for a text shorter than one)."""
        asked = passage_hashes(tokens)
        if not asked.size:
            return 0.0
        at = np.searchsorted(self.hashes, asked).clip(max=self.hashes.size - 1)
        return float((self.hashes[at] == asked).mean())
