"""How many experts are worth reading ahead, layer by layer, on this machine.

For a width k' with n would-be reads a token, u of them useful, m misses without any prediction, t ms a read and h ms of
work to hide behind:
    wait(0) = m t        wait(k') = max(0, n t - h) + (m - u) t
Reading more than fits beside the work delays what is asked for: the disk is one. Break-even is the largest width that
does not lose, best the one that waits least (0: none helps).
"""

from typing import TYPE_CHECKING, Any

from moe_lab.checks import wants_number
from moe_lab.errors import LabError
from moe_lab.simulate.table import frame

if TYPE_CHECKING:
    import pandas as pd

NEEDED = ("layer", "next_layer", "predictor", "reads", "would_read", "read_precision", "miss_coverage")
COLUMNS = (
    *("layer", "next_layer", "predictor", "reads", "bytes_per_useful_byte", "wait_ms", "wait_ms_without"),
    *("break_even", "best"),
)


def widths(df: "pd.DataFrame", *, read_ms: float, beside_ms: float) -> "pd.DataFrame":
    """A row for each row of `lab.analysis.next_layer`, columns `COLUMNS`. `read_ms`: one expert's read, as the record
    shows it (`read_ms` of stalls); `beside_ms`: work of a layer's call to hide behind. LabError for another frame.
    """
    if missing := [name for name in NEEDED if name not in getattr(df, "columns", ())]:
        raise LabError(f"widths wants rows of lab.analysis.next_layer; they lack {', '.join(missing)}.")
    for name, value in (("read_ms", read_ms), ("beside_ms", beside_ms)):
        wants_number(name, value)
    rows: list[tuple[Any, ...]] = []
    for (layer, there, predictor), pair in df.groupby(["layer", "next_layer", "predictor"], sort=False):  # type: ignore[misc]
        found = [_waits(row, read_ms, beside_ms) for row in pair.to_dict("records")]
        fine = [width for width, _, wait, without in found if wait <= without]
        best = min(found, key=lambda one: one[2])
        best_width = best[0] if best[2] < best[3] else 0
        rows += [(layer, there, predictor, *one, max(fine, default=0), best_width) for one in found]
    return frame(rows, COLUMNS)


def _waits(row: dict[Any, Any], read_ms: float, beside_ms: float) -> tuple[int, float, float, float]:
    """Width, bytes per useful byte, wait with it and without."""
    reads, precision, coverage = row["would_read"], row["read_precision"], row["miss_coverage"]
    useful = reads * precision if reads else 0.0
    missed = useful / coverage if coverage else 0.0
    wait = max(0.0, reads * read_ms - beside_ms) + (missed - useful) * read_ms
    return int(row["reads"]), 1 / precision if precision else float("inf"), wait, missed * read_ms
