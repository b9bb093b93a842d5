"""Which arm `auto` takes, by tables that were measured beforehand: shipped ones, and the user's own.

A row says for formats, a layer's shape (D, F, E, K) and T which arms were right, fastest first. The nearest row decides
(same formats; shape first, then T, by ratios), ties by order in the file: the same question has the same answer on
every call. Nothing is timed here, and a table is read once in a process.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from moe_lab.errors import LabError
from moe_lab.formats.layouts import RAW, check_layout
from moe_lab.spec import MoESpec
from moe_lab.system.environment import cpu_name
from moe_lab.system.user_cache import cache_folder, read_json, slug, write_json

VERSION = 1
SHIPPED = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured situation: `formats` of gate (where there is one), up and down; `arms` fastest first, `ms` each,
    arms on experts in other layouts by the names of `with_layout`."""

    formats: tuple[str, ...]
    d_model: int
    d_expert: int
    experts: int
    top_k: int
    tokens: int
    arms: tuple[str, ...]
    ms: tuple[float, ...]


def device_name(backend: str) -> str:
    """The device that runs a backend's work."""
    return torch.cuda.get_device_name() if backend == "cuda" else cpu_name()


def ranked(backend: str, formats: Sequence[str], spec: MoESpec | None, tokens: int | None) -> tuple[str, ...]:
    """Arms for this layer and T, fastest first; empty where no table knows the device or the formats."""
    if backend == "interpreter" or spec is None or tokens is None:
        return ()
    shape = (spec.d_routed, spec.d_expert, spec.num_experts, spec.top_k)
    return _nearest(device_name(backend), tuple(formats), shape, max(1, tokens))


def with_layout(arm: str, layout: str) -> str:
    """How benchmarks, comparisons and tables name an arm on experts in a layout: "gemv", or "gemv@tiles"."""
    return arm if layout == RAW else f"{arm}@{layout}"


def split_layout(name: str) -> tuple[str, str]:
    """The inverse: arm and layout. LabError for a layout that there is not."""
    arm, at, layout = name.partition("@")
    if at:
        check_layout(layout)
    return arm, layout if at else RAW


def in_layout(names: Sequence[str], layout: str) -> tuple[str, ...]:
    """Of the names of a table's row the arms that run on experts in this layout, in its order."""
    both = (split_layout(name) for name in names)
    return tuple(arm for arm, kept in both if kept == layout)


def best_layout(backend: str, formats: Sequence[str], spec: MoESpec) -> str:
    """The layout in which a layer is quickest at one token, by the device's table; raw where no table knows it."""
    best = ranked(backend, formats, spec, 1)
    return split_layout(best[0])[1] if best else RAW


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
    return tuple(row for path in (own_path(device), SHIPPED / f"{slug(device)}.json") for row in _read(path))


def own_path(device: str) -> Path:
    """Where the user's table of a device lies."""
    return cache_folder() / "arms" / f"{slug(device)}.json"


def write_table(path: Path, device: str, rows: Sequence[Row], about: dict[str, str]) -> Path:
    """Write a table whole, in place of what was there; `about` says what it was measured on."""
    made = write_json(path, {"version": VERSION, "device": device, "about": about, "rows": [asdict(r) for r in rows]})
    table.cache_clear()
    _nearest.cache_clear()
    return made


def _read(path: Path) -> tuple[Row, ...]:
    found = read_json(path)
    if found is None:
        return ()
    if not isinstance(found, dict) or found.get("version") != VERSION:
        seen = found.get("version") if isinstance(found, dict) else type(found).__name__
        raise LabError(
            f"{path} is an arm table of version {seen!r}; wanted {VERSION}. moe-lab bench --tune makes it anew."
        )
    try:
        return tuple(_row(row) for row in found["rows"])
    except (KeyError, TypeError, ValueError) as e:
        raise LabError(f"{path} is no arm table ({type(e).__name__}: {e}). moe-lab bench --tune makes it anew.") from e


def _row(values: dict[str, Any]) -> Row:
    given: dict[str, Any] = {f.name: values[f.name] for f in fields(Row)}
    given |= {name: tuple(given[name]) for name in ("formats", "arms", "ms")}
    row = Row(**given)
    if min(row.d_model, row.d_expert, row.experts, row.top_k, row.tokens) < 1 or not row.arms:
        raise ValueError(f"a row of sizes below 1 or without arms: {values}")
    return row
