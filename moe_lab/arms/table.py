"""Which arm `auto` takes, by tables that were measured beforehand: shipped ones, and the user's own.

A row says for formats, a layer's shape (D, F, E, K) and T which arms were right, fastest first. The nearest row decides
(same formats; shape first, then T, by ratios), ties by order in the file: the same question has the same answer on
every call. Nothing is timed here, and a table is read once in a process.
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from moe_lab.arms.names import split_layout
from moe_lab.arms.table_file import Row, load_rows, save_rows
from moe_lab.spec import MoESpec
from moe_lab.system.environment import cpu_name
from moe_lab.system.user_cache import cache_folder, slug

SHIPPED = Path(__file__).parent / "tables"


def device_name(backend: str) -> str:
    """The device that runs a backend's work."""
    return torch.cuda.get_device_name() if backend == "cuda" else cpu_name()


def ranked(backend: str, formats: Sequence[str], spec: MoESpec | None, tokens: int | None) -> tuple[str, ...]:
    """Arms for this layer and T, fastest first; empty where no table knows the device or the formats."""
    if backend == "interpreter" or spec is None or tokens is None:
        return ()
    shape = (spec.d_routed, spec.d_expert, spec.num_experts, spec.top_k)
    return _nearest(device_name(backend), tuple(formats), shape, max(1, tokens))


def in_layout(names: Sequence[str], layout: str) -> tuple[str, ...]:
    """Of the names of a table's row the arms that run on experts in this layout, in its order."""
    both = (split_layout(name) for name in names)
    return tuple(arm for arm, kept in both if kept == layout)


@cache
def _nearest(device: str, formats: tuple[str, ...], shape: tuple[int, ...], tokens: int) -> tuple[str, ...]:
    rows = [row for row in table(device) if row.formats == formats]
    if not rows:
        return ()

    def distance(row: Row) -> tuple[float, float]:
        sizes = (row.d_model, row.d_expert, row.experts, row.top_k)
        ratios = sum(abs(math.log(a / b)) for a, b in zip(sizes, shape, strict=True))
        return ratios, abs(math.log(row.tokens / tokens))

    return min(rows, key=distance).arms


@cache
def table(device: str) -> tuple[Row, ...]:
    """The user's rows for a device, then the shipped ones. LabError naming a file that is no table."""
    return tuple(row for path in (own_path(device), SHIPPED / f"{slug(device)}.json") for row in load_rows(path))


def own_path(device: str) -> Path:
    """Where the user's table of a device lies."""
    return cache_folder() / "arms" / f"{slug(device)}.json"


def write_table(path: Path, device: str, rows: Sequence[Row], about: dict[str, str]) -> Path:
    """Write a table whole, in place of what was there; `about` says what it was measured on."""
    made = save_rows(path, device, rows, about)
    table.cache_clear()
    _nearest.cache_clear()
    return made
