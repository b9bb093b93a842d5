"""`moe-lab diff`: two saved runs, record by record, and whether the second is a regression."""

from pathlib import Path
from typing import Any

from moe_lab.runs import Comparison, Pair, diff


def diff_rows(
    a: Path, b: Path, *, threshold: float, across: str, as_json: bool
) -> tuple[list[dict[str, Any]], list[str], bool]:
    """Rows (what speaks against B first, then slowest first), notes, and whether all of A was compared and nothing
    regressed. LabError for files that are no runs.

    In JSON a row holds all of `Pair.row`, and with it the verdict on the whole and the environments' differences.
    """
    found = diff(a, b, threshold=threshold, across=[name for name in across.replace(" ", "").split(",") if name])
    pairs = sorted(found.pairs, key=lambda pair: (not pair.regression, not pair.lost, -(pair.ratio or 0.0)))
    if as_json:
        whole = {"run_a": found.label_a, "run_b": found.label_b, "run_verdict": str(found.verdict)}
        whole["run_summary"] = found.summary
        whole["differences"] = "; ".join(str(difference) for difference in found.differences)
        return [{**pair.row(), **whole} for pair in pairs], [], found.ok
    return [_short(pair) for pair in pairs], _notes(found), found.ok


def _short(pair: Pair) -> dict[str, Any]:
    record = pair.record
    medians = {side: one.spread.p50 if one and one.spread else None for side, one in (("a", pair.a), ("b", pair.b))}
    return {
        "what": record.what, "case": record.case.label, "arm": record.arm, "format": record.format,
        "A": medians["a"], "B": medians["b"], "unit": record.unit, "B / A": pair.ratio,
        "verdict": str(pair.verdict), "why": pair.reason,
    }  # fmt: skip


def _notes(found: Comparison) -> list[str]:
    lines = [f"differs: {d}" + (" (blocks the comparison)" if d.blocks else "") for d in found.differences]
    return [*lines, *filter(None, [found.covers]), found.summary]
