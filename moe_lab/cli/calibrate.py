"""`moe-lab calibrate`: a disk's surface and a GPU's copy curve, kept for readers and cost models."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from moe_lab.cli.progress import progress
from moe_lab.errors import LabError
from moe_lab.stream.calibrate import ROUNDS, SCRATCH_FILE_BYTES, calibrate_copies, calibrate_disk
from moe_lab.stream.calibration import CopyPoint, DiskSurface, save_calibration

MOST_GIB = 1024  # far beyond what any disk caches


def calibrate(
    path: Path | None, *, rounds: int | None, gib: float | None, quick: bool, quiet: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of everything measured, and notes: what was taken, and where it was saved."""
    if rounds is not None and rounds < 1:
        raise LabError(f"--rounds {rounds}: wanted 1 or more.")
    if gib is not None and not 0 < gib <= MOST_GIB:
        raise LabError(f"--gib {gib:g}: wanted the size of a file to write, above 0 and at most {MOST_GIB} GiB.")
    where = Path.cwd() if path is None else path
    few = {"threads": (1, 4), "request_bytes": (256 << 10, 1 << 20), "trial_bytes": 16 << 20} if quick else {}
    with ExitStack() as stack:
        told = None if quiet else stack.enter_context(progress("reading"))
        surface = calibrate_disk(
            where, rounds=rounds or (3 if quick else ROUNDS), told=told,
            file_bytes=SCRATCH_FILE_BYTES if gib is None else int(gib * 2**30), **few,
        )  # fmt: skip
    rows, notes = _disk_rows(surface), _disk_notes(surface)
    curve: tuple[CopyPoint, ...] = ()
    device = None
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        curve = calibrate_copies(torch.device("cuda", torch.cuda.current_device()))
        rows += _copy_rows(device, curve)
    else:
        notes.append("no GPU: copies to one were not measured")
    saved = save_calibration(disk=surface, device=device, curve=curve)
    return rows, [*notes, f"saved in {saved}"]


def _disk_rows(surface: DiskSurface) -> list[dict[str, Any]]:
    return [
        {
            "what": f"disk {surface.mount}", "io": c.io, "threads": c.threads, "request_kib": c.request_bytes >> 10,
            "gb_per_s": c.gb_per_s, "gb_per_s_p20": c.gb_per_s_p20, "gb_per_s_p80": c.gb_per_s_p80,
            "cpu_s_per_gb": c.cpu_s_per_gb, "n": c.n,
        }
        for c in surface.cells
    ]  # fmt: skip


def _copy_rows(device: str, curve: tuple[CopyPoint, ...]) -> list[dict[str, Any]]:
    return [
        {
            "what": f"copy to {device}", "io": "page-locked" if p.pinned else "pageable", "threads": None,
            "request_kib": p.nbytes >> 10, "gb_per_s": p.gb_per_s, "gb_per_s_p20": p.nbytes / p.ms_p80 / 1e6,
            "gb_per_s_p80": p.nbytes / p.ms_p20 / 1e6, "cpu_s_per_gb": None, "n": p.n,
        }
        for p in curve
    ]  # fmt: skip


def _disk_notes(surface: DiskSurface) -> list[str]:
    ways = dict.fromkeys(cell.io for cell in surface.cells)
    best = surface.best("direct" if "direct" in ways else None)
    notes = [
        f"{surface.mount} ({surface.kind}): readers take {best.threads} threads and requests of "
        f"{best.request_bytes >> 10} KiB, {best.io}: {best.gb_per_s:.2f} GB/s (fewest threads within 3 % of the best)",
        "GB/s: median of shuffled cold trials with its 20th and 80th percentile; 1 GB = 10^9 bytes",
    ]
    if "direct" not in ways:
        notes.append("this file system serves no direct reads: everything goes through the page cache and out again")
    return notes
