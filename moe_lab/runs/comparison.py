"""What a comparison of two runs says: a verdict for each pair of records, one for all, and what differs around them."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from typing import TYPE_CHECKING, Any

from moe_lab.errors import MissingExtra
from moe_lab.runs.record import CASE, Record, Status

if TYPE_CHECKING:
    import pandas as pd


class Verdict(StrEnum):
    """B against A. Broken: right and timed in A, and in B, under the same conditions, wrong or not run."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    INCOMPARABLE = "incomparable"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing about the runs that differs. `blocks`: times of these two runs say nothing about each other."""

    name: str
    a: str
    b: str
    blocks: bool

    def __str__(self) -> str:
        return f"{self.name} {self.a} against {self.b}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two records of one measurement, A's and B's (None where a run lacks it), and what comes of them.

    `ratio` is B's median divided by A's, `low` and `high` its bootstrap interval (`Comparison.share`), all None where
    there is no verdict on time. `reason` says why not, or what the verdict rests on.
    """

    a: Record | None
    b: Record | None
    verdict: Verdict
    reason: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def record(self) -> Record:
        """Whichever there is: what was measured."""
        record = self.a or self.b
        assert record is not None
        return record

    @property
    def regression(self) -> bool:
        """Slower, or no longer right."""
        return self.verdict in (Verdict.SLOWER, Verdict.BROKEN)

    @property
    def lost(self) -> bool:
        """Measured in A, and not compared: missing in B, or incomparable."""
        return self.verdict is Verdict.INCOMPARABLE and self.a is not None and self.a.status is Status.PASSED

    def row(self) -> dict[str, Any]:
        """Flat: what was measured, both medians and statuses, ratio, interval, verdict, reason."""
        record = self.record
        named = {name: getattr(record, name) for name in ("arm", "shared_arm", "format", "metric", "unit")}
        sides = {}
        for side, one in (("a", self.a), ("b", self.b)):
            spread = one.spread if one else None
            sides |= {
                f"status_{side}": str(one.status) if one else None,
                f"p50_{side}": spread.p50 if spread else None,
                f"n_{side}": spread.n if spread else None,
                f"error_{side}": one.error if one else None,
            }
        return {
            "what": record.what, **{name: getattr(record.case, name) for name in CASE}, **named, **sides,
            "ratio": self.ratio, "ratio_low": self.low, "ratio_high": self.high, "regression": self.regression,
            "verdict": str(self.verdict), "reason": self.reason,
        }  # fmt: skip


FAMILY = 0.95
"""How surely all intervals of a comparison hold at once."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Comparison:
    """`diff(a, b)`: pairs, what differs between the runs, and the verdict on the whole.

    The whole is broken when any pair is, else slower when any is; incomparable when none could be judged; else faster
    when any pair is, else same. `share` is the level of each interval, chosen so that all of them hold together
    (`covers`).
    """

    label_a: str
    label_b: str
    pairs: tuple[Pair, ...]
    differences: tuple[Difference, ...]
    threshold: float
    share: float = FAMILY

    @property
    def ok(self) -> bool:
        """Everything measured in A was compared, something was, and no pair is a regression."""
        bad = any(pair.regression or pair.lost for pair in self.pairs)
        return not bad and self.verdict is not Verdict.INCOMPARABLE

    @property
    def verdict(self) -> Verdict:
        """Of the whole, as the class says."""
        seen = {pair.verdict for pair in self.pairs}
        ranked = (Verdict.BROKEN, Verdict.SLOWER, Verdict.FASTER, Verdict.SAME)
        return next((verdict for verdict in ranked if verdict in seen), Verdict.INCOMPARABLE)

    @property
    def summary(self) -> str:
        """One line: the verdict, how many pairs went which way, what of A was not compared, what stands between."""
        count = Counter(pair.verdict for pair in self.pairs)
        went = ", ".join(f"{count[v]} {v}" for v in Verdict if count[v])
        parts = [f"{self.verdict}: of {len(self.pairs)} pairs {went or 'none'}"]
        if count[Verdict.BROKEN]:
            parts.append(f"{count[Verdict.BROKEN]} passed before and do not now")
        if lost := [_named(pair.record) for pair in self.pairs if pair.lost]:
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            parts.append(f"measured in A and not compared: {', '.join(lost[:3])}{more}")
        elif self.verdict is Verdict.INCOMPARABLE:
            parts.append("nothing was compared")
        if blocks := [str(difference) for difference in self.differences if difference.blocks]:
            parts.append(f"the runs differ in {', '.join(blocks)}")
        return "; ".join(parts)

    @property
    def covers(self) -> str:
        """What the intervals hold for: all at once, and within these two runs. Empty where there is none."""
        n = sum(pair.ratio is not None for pair in self.pairs)
        if not n:
            return ""
        hold = f"the interval holds at {100 * FAMILY:.0f} %"
        if n > 1:
            hold = f"the {n} intervals hold at once at {100 * FAMILY:.0f} % (each at {100 * self.share:.4f} %)"
        return f"{hold} for noise within these two runs; what changes from one run to the next is in no interval"

    def __repr__(self) -> str:
        return f"Comparison(A {self.label_a}, B {self.label_b}: {self.summary})"

    @property
    def table(self) -> "pd.DataFrame":
        """A row a pair (`Pair.row`)."""
        try:
            import pandas as pd
        except ImportError as e:
            raise MissingExtra("pandas", "lab", "A comparison's table") from e
        return pd.DataFrame([pair.row() for pair in self.pairs])

    def _repr_html_(self) -> str:
        """The summary, the environment differences, and the twelve pairs that say most."""
        ranked = sorted(self.pairs, key=lambda pair: (not pair.regression, -abs((pair.ratio or 1.0) - 1.0)))
        rows = "".join(_html_row(pair) for pair in ranked[:12])
        head = "".join(
            f"<th>{n}</th>" for n in ("what", "case", "arm", "format", "B / A", "interval", "verdict", "why")
        )
        around = "".join(f"<li>{escape(str(d))}{' (blocks)' if d.blocks else ''}</li>" for d in self.differences)
        more = f"<p>{len(ranked) - 12} more in <code>.table</code></p>" if len(ranked) > 12 else ""
        title = f"<b>A {escape(self.label_a)}, B {escape(self.label_b)}: {escape(self.summary)}</b>"
        return f"<div>{title}<ul>{around}</ul><table><tr>{head}</tr>{rows}</table>{more}<p>{self.covers}</p></div>"


def _named(record: Record) -> str:
    return " ".join(part for part in (record.what, record.case.label, record.arm, record.format) if part)


def _html_row(pair: Pair) -> str:
    ratio = "" if pair.ratio is None else f"{pair.ratio:.3f}"
    span = "" if pair.low is None or pair.high is None else f"{pair.low:.3f} to {pair.high:.3f}"
    r = pair.record
    cells = (r.what, r.case.label, r.arm, r.format, ratio, span, str(pair.verdict), pair.reason)
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
