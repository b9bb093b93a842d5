"""`moe-lab reproduce`: a report run again, and the numbers that moved."""

from dataclasses import asdict
from pathlib import Path
from typing import Any


def reproduce_page(
    page: Path, *, threshold: float, times: bool, timeout_s: float, quiet: bool
) -> tuple[list[dict[str, Any]], list[str], bool]:
    """Rows (what moved), notes, and whether the page holds. Moved times count with `times` alone."""
    from moe_lab.report.reproduce import reproduce
    from moe_lab.report.run import show_progress

    found = reproduce(page, threshold=threshold, timeout_s=timeout_s, progress=None if quiet else show_progress)
    rows = [asdict(one) for one in found.moved]
    slow = sum(one.kind == "time" for one in found.moved)
    notes = [f"a claim fails now: {found.broken}"] if found.broken else []
    notes.append(
        f"{found.compared} numbers compared: {len(rows) - slow} moved by more than {threshold:.0%}, and {slow} times"
        + ("" if times or not slow else " (which count with --times)")
    )
    notes += [f"{key}: {a} -> {b}" for key, (a, b) in found.environment.items()]
    return rows, notes, found.holds(times=times)
