"""Run a report's own notebook again, with its parameters, and list which of its numbers moved.

The cells come out of the page, so what runs is what made it, even when the notebook has changed since: reproduce pages
that you trust. A number has moved when it differs by more than the threshold and by more than its last digit shown.
Times move from machine to machine and from run to run; they are listed, and count only when asked for.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_lab.errors import LabError
from moe_lab.report.execute import CellError, Progress, execute
from moe_lab.report.numbers import Number, numbers
from moe_lab.report.parameters import with_parameters
from moe_lab.report.record import folder_of, notebook_of, read_record
from moe_lab.system.environment import environment


@dataclass(frozen=True, slots=True)
class Moved:
    """A number that is not what the page says. `kind`: "value", "time", "gone" (not shown any more) or "new".

    `change` is relative to before; None where one is missing, or before was 0.
    """

    kind: str
    cell: int
    title: str
    row: str
    column: str
    before: str
    after: str
    change: float | None


@dataclass(frozen=True, slots=True)
class Reproduction:
    """`moved`: values before times; `compared`: how many numbers both runs show; `environment`: what differs, by key.

    `broken`: the line of the claim that no longer holds, "" when all cells ran.
    """

    moved: tuple[Moved, ...]
    compared: int
    environment: dict[str, tuple[str, str]]
    broken: str = ""

    def holds(self, *, times: bool = False) -> bool:
        """Whether the page's numbers stand; moved times count with `times`."""
        return not self.broken and not any(times or one.kind != "time" for one in self.moved)


def reproduce(
    page: str | Path, *, threshold: float = 0.05, timeout_s: float = 600.0, progress: Progress | None = None
) -> Reproduction:
    """Run the notebook that a report holds, with its parameters, in the folder it ran in (seen from the page).

    `threshold`: relative change beyond which a number has moved. An assertion of the notebook that fails now is an
    answer (`broken`). LabError for a page that is no finished report of ours; CellError when a cell fails otherwise.
    """
    if not 0 <= threshold < float("inf"):
        raise LabError(f"threshold={threshold}; wanted a relative change of 0 or more, such as 0.05.")
    path = Path(page)
    record = read_record(path)
    notebook, params, before = notebook_of(record, path)
    name = str(record.get("notebook") or path.name)
    made = with_parameters(notebook, params, name)
    broken = ""
    try:
        execute(made, folder_of(record, path), name, timeout_s=timeout_s, progress=progress)
    except CellError as error:
        if not error.is_claim:
            raise
        broken = f"cell {error.cell} ({error.title}) {error.why}"
    after = numbers(made)
    if broken:  # cells after the claim did not run, so what they showed is not gone
        reached = max((n.cell for n in after), default=0)
        before = [n for n in before if n.cell <= reached]
    here, there = environment(), dict(record.get("environment") or {})
    differs = {key: (str(there[key]), here[key]) for key in here if key in there and str(there[key]) != here[key]}
    compared = len({n.key for n in before} & {n.key for n in after})
    return Reproduction(compare(before, after, threshold), compared, differs, broken)


def compare(before: list[Number], after: list[Number], threshold: float) -> tuple[Moved, ...]:
    """The numbers that moved, in the order of the page, times last."""
    now = {n.key: n for n in after}
    was = {n.key: n for n in before}
    found = [_moved(one, now.get(key)) for key, one in was.items() if _differs(one, now.get(key), threshold)]
    found += [_row("new", one, "", one.text, None) for key, one in now.items() if key not in was]
    return tuple(sorted(found, key=lambda one: one.kind == "time"))


def _differs(one: Number, other: Number | None, threshold: float) -> bool:
    if other is None:
        return True
    a, b = one.value, other.value
    if a != a or b != b or abs(a) == float("inf") or abs(b) == float("inf"):
        return not (a == b or (a != a and b != b))
    step = max(one.last_digit, other.last_digit) * (1 + 1e-9)
    return abs(b - a) > step and abs(b - a) > threshold * abs(a)


def _moved(one: Number, other: Number | None) -> Moved:
    if other is None:
        return _row("gone", one, one.text, "", None)
    a, b = one.value, other.value
    change: Any = (b - a) / abs(a) if a and a == a and b == b else None
    return _row("time" if one.is_time else "value", one, one.text, other.text, change)


def _row(kind: str, n: Number, before: str, after: str, change: float | None) -> Moved:
    return Moved(kind, n.cell, n.title, n.row, n.column, before, after, change)
