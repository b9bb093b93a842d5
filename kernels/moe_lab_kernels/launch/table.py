"""Launch parameters by device: what was measured on it, looked up at each launch, nearest entry first.

A table is a JSON file a device: entries of a kernel, a weight format, the rows a tile (or a chunk) serves, whether gate
and up go together, the weights' [N, Kd], and the fields of the tile that was quickest there. An entry serves its
kernel, format, tokens and form alone; of several the nearest in N and Kd (by ratios), then the earlier. Where there is
none, a kernel's built-in tile stays: an unknown device has no table. The user's own table comes before the shipped one.
The same question has the same answer on every call, nothing is timed here, and no field changes a bit of any result.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_lab.errors import LabError
from moe_lab.system.user_cache import cache_folder, read_json, slug, write_json
from moe_lab_kernels.backend import INTERPRETED
from moe_lab_kernels.launch.schema import KERNELS

VERSION = 1
SHIPPED = Path(__file__).parent / "tables"
REMEDY = "moe-lab bench --tune makes it anew."
Tile = TypeVar("Tile")


@dataclass(frozen=True, slots=True)
class Entry:
    """One measured situation. `cut`: the tile's fields that differ from the built-in tile, or some of the others;
    `us`, `default_us`: microseconds of this cut and of the built-in tile."""

    kernel: str
    format: str
    tokens: int
    gated: bool
    n: int
    kd: int
    cut: Mapping[str, Any] = field(hash=False)
    us: float
    default_us: float

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"no kernel is called {self.kernel!r}; known: {', '.join(KERNELS)}")
        for name in ("tokens", "n", "kd"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; wanted a whole number, 1 or more")
        if type(self.gated) is not bool or not isinstance(self.format, str) or not isinstance(self.cut, Mapping):
            raise ValueError("wanted a format's name, gated as true or false, and cut as names and values")
        for name in ("us", "default_us"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}; wanted microseconds, a positive number")
        for name, value in self.cut.items():
            allowed = KERNELS[self.kernel].get(name)
            if allowed is None:
                raise ValueError(f"{self.kernel} has no {name!r}; known: {', '.join(KERNELS[self.kernel])}")
            why = allowed.refusal(value)
            if why is not None:
                raise ValueError(f"{name}: {why}")


def cut(
    kernel: str, tile: Tile, device: torch.device, format: str, tokens: int, *, gated: bool, n: int, kd: int
) -> Tile:
    """`tile`, or what this device's table has in its place for weights [n, kd] of a format.

    tile: the kernel's built-in one, a named tuple with the fields of `schema.KERNELS[kernel]`; tokens: rows of x that a
    tile serves. In the interpreter, and off CUDA, nothing is looked up. LabError naming the file that is no table.
    """
    name = None if INTERPRETED else device_name(device)
    return tile if name is None else _cut(name, kernel, tile, format, tokens, gated, n, kd)


@cache
def _cut(device: str, kernel: str, tile: Any, format: str, tokens: int, gated: bool, n: int, kd: int) -> Any:
    entry = nearest(table(device), kernel, format, tokens, gated=gated, n=n, kd=kd)
    if entry is None:
        return tile
    return tile._replace(**entry.cut)


def nearest(
    entries: Sequence[Entry], kernel: str, format: str, tokens: int, *, gated: bool, n: int, kd: int
) -> Entry | None:
    """The entry that decides, or None."""
    asked = (kernel, format, tokens, gated)
    fit = [e for e in entries if (e.kernel, e.format, e.tokens, e.gated) == asked]
    return min(fit, key=lambda e: abs(math.log(e.n / n)) + abs(math.log(e.kd / kd)), default=None)


def device_name(device: torch.device) -> str | None:
    """Whose table serves a device; None where tiles are not looked up."""
    return _PRETENDED.get() or (_cuda_name(device) if device.type == "cuda" else None)


@cache
def _cuda_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


_PRETENDED: ContextVar[str | None] = ContextVar("moe_lab_launch_device", default=None)


@contextmanager
def looked_up_for(device: str | None) -> Iterator[None]:
    """Launchers inside the block take the tiles of a device of this name, wherever tensors lie: to compile for it."""
    token = _PRETENDED.set(device)
    try:
        yield
    finally:
        _PRETENDED.reset(token)


def shipped_devices() -> list[str]:
    """Devices that have a shipped table, by name."""
    return [read_json(path)["device"] for path in sorted(SHIPPED.glob("*.json"))]


@cache
def table(device: str) -> tuple[Entry, ...]:
    """The user's entries for a device, then the shipped ones. LabError naming the file, and the entry, at fault."""
    return tuple(entry for path in (own_path(device), SHIPPED / f"{slug(device)}.json") for entry in read_table(path))


def own_path(device: str) -> Path:
    """Where the user's table of a device lies."""
    return cache_folder() / "launch" / f"{slug(device)}.json"


def write_table(path: Path, device: str, entries: Sequence[Entry], about: Mapping[str, str]) -> Path:
    """Write a table whole, in place of what was there; `about` says what it was measured on."""
    rows = [{**asdict(e), "cut": dict(e.cut)} for e in entries]
    made = write_json(path, {"version": VERSION, "device": device, "about": dict(about), "entries": rows})
    forget()
    return made


def forget() -> None:
    """Read tables anew when next asked."""
    table.cache_clear()
    _cut.cache_clear()


def read_table(path: Path) -> tuple[Entry, ...]:
    """A file's entries; none where there is no file. LabError naming the file, and the entry, at fault."""
    found = read_json(path)
    if found is None:
        return ()
    if not isinstance(found, dict) or found.get("version") != VERSION:
        seen = found.get("version") if isinstance(found, dict) else type(found).__name__
        raise LabError(f"{path} is a launch table of version {seen!r}; wanted {VERSION}. {REMEDY}")
    rows = found.get("entries")
    if not isinstance(rows, list):
        raise LabError(f"{path} is no launch table: entries are {type(rows).__name__}, wanted a list. {REMEDY}")
    made = []
    for number, row in enumerate(rows):
        try:
            made.append(Entry(**{f.name: row[f.name] for f in fields(Entry)}))
        except (KeyError, TypeError, ValueError) as e:
            raise LabError(f"{path}, entry {number}: {type(e).__name__}: {e}. {REMEDY}") from e
    return tuple(made)
