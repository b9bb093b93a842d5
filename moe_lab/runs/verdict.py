"""Is B faster than A? Where both measured the same thing on the same machine, as far as their samples settle it.

Two runs are comparable when device, backend, driver, torch, triton, threads and seed agree. The code under test
(commit, package version, options) is what may differ; that and everything else that does is listed.
"""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from moe_lab.errors import LabError, LabTypeError
from moe_lab.runs.bootstrap import LEAST_SAMPLES, least_doubt, ratio_interval
from moe_lab.runs.comparison import FAMILY, Comparison, Difference, Pair, Verdict
from moe_lab.runs.pairs import Couple, couples, unlike, unpaired
from moe_lab.runs.record import Record, Status
from moe_lab.runs.run import Run

BLOCKING = ("device", "backend", "driver", "torch", "triton", "threads", "seed")
THRESHOLD = 0.02
"""A ratio closer to 1 than this is noise between sessions, whatever the interval says."""
_TIMES = ("s", "ms", "us", "ns")


def diff(
    a: Run | str | Path,
    b: Run | str | Path,
    *,
    threshold: float = THRESHOLD,
    across: Sequence[str] = (),
    seed: int = 0,
) -> Comparison:
    """Compare run B with run A, record by record.

    Slower: the time's ratio is beyond 1 + threshold and its interval (bootstrap of both medians, drawn from `seed`)
    excludes 1; faster: the same the other way; same: neither; broken: PASSED in A, in B no longer. The intervals of all
    timed pairs hold at once at 95 % (Sidak: each at 0.95 ** (1 / pairs)), for noise within these two runs: equal runs
    are called equal whatever their number of records, unless something changed from one run to the next. Units ending
    in "/s" are rates, where more is faster. `across`: names of BLOCKING, or "method", that may differ all the same,
    when it is they that are compared.
    LabError for files that are no runs, a threshold outside 0 to 1, unknown names in `across`.
    """
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold < 1:
        raise LabError(f"threshold={threshold!r}: wanted a share from 0 to below 1; 0.02 is 2 %.")
    if isinstance(across, str) or not {*across} <= {*BLOCKING, "method"}:
        raise LabError(f"across={across!r}: wanted names out of {', '.join((*BLOCKING, 'method'))}.")
    a, b = _run(a), _run(b)
    found = differences(a, b, across)
    judged = [_judge(couple, found, across) for couple in couples(a.records, b.records)]
    share = FAMILY ** (1 / max(1, sum(not isinstance(one, Pair) for one in judged)))
    pairs = tuple(one if isinstance(one, Pair) else _timed(*one, threshold, seed, share) for one in judged)
    return Comparison(a.label, b.label, pairs, found, threshold, share)


def differences(a: Run, b: Run, across: Sequence[str] = ()) -> tuple[Difference, ...]:
    """What differs between two runs beside their records and dates, what blocks a comparison first."""
    about_a, about_b = _about(a), _about(b)
    names = [*BLOCKING, *(name for name in {**about_a, **about_b} if name not in BLOCKING)]
    found = [
        Difference(name, about_a.get(name, "not recorded"), about_b.get(name, "not recorded"), _blocks(name, across))
        for name in names
        if about_a.get(name) != about_b.get(name)
    ]
    return tuple(sorted(found, key=lambda difference: not difference.blocks))


def _blocks(name: str, across: Sequence[str]) -> bool:
    return name in BLOCKING and name not in across


def _about(run: Run) -> dict[str, str]:
    options = {f"option {name}": str(value) for name, value in run.options.items()}
    known = {"seed": "" if run.seed is None else str(run.seed), "workload": run.workload}
    return {name: text for name, text in {**run.environment, **known, **options}.items() if text}


def _run(run: Run | str | Path) -> Run:
    if isinstance(run, str | Path):
        return Run.load(run)
    if not isinstance(run, Run):
        raise LabTypeError(f"diff compares two Runs or their files, got {type(run).__name__}.")
    return run


def _judge(couple: Couple, found: Sequence[Difference], across: Sequence[str]) -> Pair | tuple[Record, Record]:
    """The verdict where no time decides it, else the two records whose times do."""
    a, b = (min(records, key=lambda r: r.status is not Status.PASSED, default=None) for records in couple)
    alone = unpaired(couple)
    if alone or a is None or b is None:
        return Pair(a, b, Verdict.INCOMPARABLE, alone or "")
    around = {difference.name: str(difference) for difference in found if difference.blocks}
    between = {name: text for name, text in unlike(a, b).items() if name not in across}
    if blocks := around | between:
        return Pair(a, b, Verdict.INCOMPARABLE, ", ".join(blocks.values()))
    if a.status != b.status:
        said = next((f" ({r.reason})" for r in (b, a) if r.reason), "")
        verdict = Verdict.BROKEN if a.status is Status.PASSED else Verdict.INCOMPARABLE
        return Pair(a, b, verdict, f"{a.status} against {b.status}{said}")
    if a.status is not Status.PASSED:
        return Pair(a, b, Verdict.SAME, f"{a.status} in both")
    if reason := _untimed(a, b):
        return Pair(a, b, Verdict.INCOMPARABLE, reason)
    return a, b


def _untimed(a: Record, b: Record) -> str | None:
    """Why two passed records have no ratio; None when they have."""
    assert a.spread is not None
    assert b.spread is not None
    if a.unit not in _TIMES and not a.unit.endswith("/s"):
        return f"{a.metric} in {a.unit} is neither a time nor a rate"
    for side, spread in (("A", a.spread), ("B", b.spread)):
        if not spread.samples:
            return f"{side} keeps percentiles alone; an interval needs its samples"
        if spread.n < LEAST_SAMPLES:
            return f"{side} has {spread.n} samples; an interval needs {LEAST_SAMPLES}"
        if min(spread.samples) == 0:
            return f"{side} holds samples of 0: its clock is too coarse"
    return None


def _timed(a: Record, b: Record, threshold: float, seed: int, share: float) -> Pair:
    assert a.spread is not None
    assert b.spread is not None
    if least_doubt(a.spread.n, b.spread.n) > 1 - share:
        needed = next(n for n in count(LEAST_SAMPLES) if least_doubt(n, n) <= 1 - share)
        return Pair(
            a, b, Verdict.INCOMPARABLE,
            f"{a.spread.n} and {b.spread.n} samples; an interval that holds beside those of all other pairs needs "
            f"{needed} each",
        )  # fmt: skip
    ratio = b.spread.p50 / a.spread.p50
    low, high = ratio_interval(a.spread.samples, b.spread.samples, seed=seed, share=share)
    more = ratio > 1 + threshold and low > 1
    less = ratio < 1 / (1 + threshold) and high < 1
    rate = a.unit.endswith("/s")
    if more or less:
        verdict = Verdict.SLOWER if more != rate else Verdict.FASTER
        reason = f"{ratio - 1:+.1%}, interval {low - 1:+.1%} to {high - 1:+.1%}"
    else:
        verdict = Verdict.SAME
        inside = low <= 1 <= high
        reason = f"the interval holds 1: {low:.3f} to {high:.3f}" if inside else f"within {threshold:.1%}"
    return Pair(a, b, verdict, reason, ratio, low, high)
