"""What `moe-lab calibrate` found out about this machine: its disks, and copies to its GPUs.

Kept as one JSON file a machine in the user's cache folder. Readers take their threads and request size from it, cost
models their bandwidths; without one there are defaults, and no bandwidth is guessed.
"""

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from moe_lab.errors import LabError
from moe_lab.stream.jobs import REQUEST_BYTES
from moe_lab.system.user_cache import cache_folder, read_json, slug, write_json

THREADS = 4  # without a calibration: queue depths from 4 on reach a drive's speed, more only share it
EQUAL = 1.03  # within this, the cheaper of two settings is taken: noise must not move them
_VERSION = 1


class Reading(NamedTuple):
    """How a reader goes at a disk: threads, and bytes a request."""

    threads: int
    request_bytes: int


@dataclass(frozen=True, slots=True)
class DiskCell:
    """One setting's throughput over `n` interleaved trials; GB = 10^9 bytes. `io` as in `stream.access`."""

    threads: int
    request_bytes: int
    io: str
    gb_per_s: float  # median
    gb_per_s_p20: float
    gb_per_s_p80: float
    cpu_s_per_gb: float  # processor seconds of the reading threads, median
    n: int


@dataclass(frozen=True, slots=True)
class DiskSurface:
    """Threads x request size x way of reading, of one file system."""

    mount: str
    kind: str
    date: str
    cells: tuple[DiskCell, ...]

    def best(self, io: str | None = None) -> DiskCell:
        """The fastest setting; of those within 3 % the one with fewest threads, then the largest request. LabError when
        nothing was measured with `io`.
        """
        cells = [cell for cell in self.cells if io in (None, cell.io)]
        if not cells:
            raise LabError(f"the calibration of {self.mount} has nothing measured with io={io!r}.")
        top = max(cell.gb_per_s for cell in cells)
        near = [cell for cell in cells if cell.gb_per_s * EQUAL >= top]
        return min(near, key=lambda cell: (cell.threads, -cell.request_bytes, cell.cpu_s_per_gb))

    def gb_per_s(self, request_bytes: int, threads: int, io: str | None = None) -> float:
        """The median of the setting nearest to this one, by ratio."""
        cells = [cell for cell in self.cells if io in (None, cell.io)] or list(self.cells)
        return min(
            cells,
            key=lambda c: abs(math.log(c.request_bytes / request_bytes)) + abs(math.log(c.threads / threads)),
        ).gb_per_s


@dataclass(frozen=True, slots=True)
class CopyPoint:
    """Copies of `nbytes` from host to device: milliseconds of `n` of them, from page-locked memory or not."""

    nbytes: int
    pinned: bool
    ms: float  # median
    ms_p20: float
    ms_p80: float
    n: int

    @property
    def gb_per_s(self) -> float:
        """At the median."""
        return self.nbytes / self.ms / 1e6


@dataclass(frozen=True, slots=True)
class Calibration:
    """A machine's disks by mount point and its copy curves by device name; empty where nothing was measured."""

    machine: str
    disks: Mapping[str, DiskSurface] = field(default_factory=dict)
    host_device: Mapping[str, tuple[CopyPoint, ...]] = field(default_factory=dict)

    def disk_of(self, path: str | os.PathLike[str]) -> DiskSurface | None:
        """The surface of the file system that holds `path`; None when that was not measured."""
        return self.disks.get(mount_of(path))

    def copy_ms(self, device: str, nbytes: int, pinned: bool = True) -> float | None:
        """Milliseconds of one copy, between measured sizes by a straight line, beyond them at the last one's speed."""
        points = sorted((p for p in self.host_device.get(device, ()) if p.pinned == pinned), key=lambda p: p.nbytes)
        if not points:
            return None
        if nbytes <= points[0].nbytes:
            return points[0].ms
        for below, above in pairwise(points):
            if nbytes <= above.nbytes:
                share = (nbytes - below.nbytes) / (above.nbytes - below.nbytes)
                return below.ms + share * (above.ms - below.ms)
        return points[-1].ms * nbytes / points[-1].nbytes


def calibration_path() -> Path:
    """Where this machine's calibration is kept."""
    return cache_folder() / "calibration" / f"{slug(platform.node() or 'machine')}.json"


def load_calibration(path: str | os.PathLike[str] | None = None) -> Calibration:
    """The saved one, empty where there is none. LabError, naming the file, for one that cannot be read."""
    where = calibration_path() if path is None else Path(path)
    value = read_json(where)
    empty = Calibration(platform.node())
    if value is None:
        return empty
    try:
        if value["version"] != _VERSION:
            return empty  # another version of the lab measured other things
        disks = {
            mount: DiskSurface(mount, d["kind"], d["date"], tuple(DiskCell(**cell) for cell in d["cells"]))
            for mount, d in value["disks"].items()
        }
        curves = {name: tuple(CopyPoint(**p) for p in points) for name, points in value["host_device"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise LabError(f"{where} is no calibration ({error}). Delete it: it can be measured again.") from error
    return Calibration(value["machine"], disks, curves)


def save_calibration(
    *,
    disk: DiskSurface | None = None,
    device: str | None = None,
    curve: Sequence[CopyPoint] = (),
    path: str | os.PathLike[str] | None = None,
) -> Path:
    """Put what was measured beside what is known already; returns the file. LabError when it cannot be written."""
    where = calibration_path() if path is None else Path(path)
    known = load_calibration(where)
    disks = dict(known.disks) | ({disk.mount: disk} if disk is not None else {})
    curves = dict(known.host_device) | ({device: tuple(curve)} if device is not None else {})
    value: dict[str, Any] = {
        "version": _VERSION, "machine": known.machine,
        "disks": {mount: asdict(surface) for mount, surface in disks.items()},
        "host_device": {name: [asdict(p) for p in points] for name, points in curves.items()},
    }  # fmt: skip
    _remembered.clear()
    return write_json(where, value)


_remembered: dict[tuple[Path, str], Reading] = {}


def reading_for(path: str | os.PathLike[str]) -> Reading:
    """Threads and request size for files on the disk that holds `path`: calibrated, else the defaults."""
    key = calibration_path(), mount_of(path)
    if key not in _remembered:
        surface = load_calibration().disk_of(path)
        if surface is None:
            _remembered[key] = Reading(THREADS, REQUEST_BYTES)
        else:
            best = surface.best("direct" if any(cell.io == "direct" for cell in surface.cells) else None)
            _remembered[key] = Reading(best.threads, best.request_bytes)
    return _remembered[key]


def mount_of(path: str | os.PathLike[str]) -> str:
    """The mount point of the file system that holds `path`."""
    where = os.path.realpath(path)
    while not os.path.ismount(where) and os.path.dirname(where) != where:
        where = os.path.dirname(where)
    return where


def file_system_of(mount: str) -> str:
    """Kind and device of a mount point as Linux lists them: "ext4 /dev/vda"; "unknown" elsewhere."""
    try:
        with open("/proc/self/mounts") as lines:
            found = [line.split() for line in lines]
    except OSError:
        return "unknown"
    named = [f"{kind} {device}" for device, point, kind, *_ in found if point == mount]
    return named[-1] if named else "unknown"
