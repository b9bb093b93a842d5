"""What a comparison of two runs says: a verdict for each pair of records, one for all, and what differs around them."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from typing import TYPE_CHECKING, Any

from moe_lab.errors import MissingExtra
from moe_lab.runs.record import CASE, Record

if TYPE_CHECKING:
    import pandas as pd


class Verdict(StrEnum):
    """B against A."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    INCOMPARABLE = "incomparable"


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

    `ratio` is B's median divided by A's, `low` and `high` its 95 % bootstrap interval, all None where there is no
    verdict on time. `reason` says why not, or what the verdict rests on. `broke`: right and timed in A, and in B, under
    the same conditions, wrong or not run.
    """

    a: Record | None
    b: Record | None
    verdict: Verdict
    reason: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    broke: bool = False

    @property
    def record(self) -> Record:
        """Whichever there is: what was measured."""
        record = self.a or self.b
        assert record is not None
        return record

    @property
    def regression(self) -> bool:
        """Slower, or no longer right."""
        return self.broke or self.verdict is Verdict.SLOWER

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


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """`diff(a, b)`: pairs, what differs between the runs, and the verdict on the whole.

    The whole is slower when any pair is; incomparable when a pair broke or none could be judged; else faster when any
    pair is, else same. `ok` is False when there is a regression: a pair that is slower, or right before and not now.
    """

    label_a: str
    label_b: str
    pairs: tuple[Pair, ...]
    differences: tuple[Difference, ...]
    threshold: float

    @property
    def ok(self) -> bool:
        """No pair is a regression."""
        return not any(pair.regression for pair in self.pairs)

    @property
    def verdict(self) -> Verdict:
        """Of the whole, as the class says."""
        seen = {pair.verdict for pair in self.pairs}
        if Verdict.SLOWER in seen:
            return Verdict.SLOWER
        if any(pair.broke for pair in self.pairs) or not seen - {Verdict.INCOMPARABLE}:
            return Verdict.INCOMPARABLE
        return Verdict.FASTER if Verdict.FASTER in seen else Verdict.SAME

    @property
    def summary(self) -> str:
        """One line: the verdict, how many pairs went which way, and what stands between the runs."""
        count = Counter(pair.verdict for pair in self.pairs)
        text = f"{self.verdict}: of {len(self.pairs)} pairs " + ", ".join(
            f"{count[v]} {v}" for v in Verdict if count[v]
        )
        broke = sum(pair.broke for pair in self.pairs)
        text += f"; {broke} passed before and do not now" if broke else ""
        blocks = [str(difference) for difference in self.differences if difference.blocks]
        return f"{text}; the runs differ in {', '.join(blocks)}" if blocks else text

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
        return f"<div>{title}<ul>{around}</ul><table><tr>{head}</tr>{rows}</table>{more}</div>"


def _html_row(pair: Pair) -> str:
    ratio = "" if pair.ratio is None else f"{pair.ratio:.3f}"
    span = "" if pair.low is None or pair.high is None else f"{pair.low:.3f} to {pair.high:.3f}"
    r = pair.record
    cells = (r.what, r.case.label, r.arm, r.format, ratio, span, str(pair.verdict), pair.reason)
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
