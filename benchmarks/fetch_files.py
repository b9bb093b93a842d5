"""The files that fetch timings read, with every byte known, and the check of what a way of reading brings in."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from moe_lab.errors import LabError
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.source import ExpertSource


def write_model(path: Path, experts: int, expert_bytes: int) -> ExpertSource:
    """A file of f16 gate and up and f32 down, `expert_bytes` an expert together, every byte from a seed."""
    values = expert_bytes // 8
    columns = 1024
    rows, block = values // columns, np.random.default_rng(0).integers(0, 256, expert_bytes + experts, np.uint8)
    shapes = (("gate", "f16", 2), ("up", "f16", 2), ("down", "f32", 4))
    slices, at = [], 37  # no part begins where a block of the disk does
    with open(path, "wb") as out:
        out.write(b"h" * 37)
        for name, fmt, width in shapes:
            nbytes = values * width
            slices.append((name, fmt, at, nbytes, (experts, rows, columns)))
            for expert in range(experts):
                out.write(wanted(block, expert, name, nbytes).tobytes())
            at += experts * nbytes
        out.flush()
        os.fsync(out.fileno())
    source = ExpertSource(path, {0: slices}, model_hash="fetch timings")
    source.block = block  # type: ignore[attr-defined]
    return source


def wanted(block: np.ndarray, expert: int, name: str, nbytes: int) -> np.ndarray:
    """The bytes of one part: a window of the seed's that no other has."""
    start = expert + {"gate": 0, "up": 1, "down": 2}[name] * 7
    return block[start : start + nbytes]  # a part is at most half an expert, so that the block is long enough


def check(source: ExpertSource, block: np.ndarray, **how: Any) -> str:
    """The way the experts were read, once every one has the right bytes. LabError for the first that has not."""
    device = how.pop("device", "cpu")
    with ExpertCache(slots=8, **how) as cache:
        cache.bind(source, device)
        for wave in cache.waves(range(source.num_experts(0))):
            with cache.lease(source, 0, wave) as lease:
                for place, expert in enumerate(wave):
                    for part in source.parts(0):
                        got = lease.views(part.name)[lease.slots[place]].flatten().cpu().numpy()
                        if not np.array_equal(got, wanted(block, expert, part.name, part.nbytes)):
                            raise LabError(f"{source!r}: expert {expert}, {part.name} has wrong bytes")
        assert cache.io_mode is not None
        return cache.io_mode


def drop(*paths: Path) -> None:
    """Out of the page cache with them."""
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
