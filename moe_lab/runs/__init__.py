"""Keeping what was measured: records with their environment, saved whole, loaded together, compared with care."""

from moe_lab.runs.collect import runs
from moe_lab.runs.comparison import Comparison, Difference, Pair, Verdict
from moe_lab.runs.record import Case, Record, Spread, Status
from moe_lab.runs.run import Run, measured
from moe_lab.runs.verdict import diff

__all__ = [
    "Case", "Comparison", "Difference", "Pair", "Record", "Run", "Spread", "Status", "Verdict", "diff", "measured",
    "runs",
]  # fmt: skip
