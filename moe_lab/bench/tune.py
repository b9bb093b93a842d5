"""Which arm is fastest where: measured once, by asking, and kept as the table that `auto` reads.

Times are cold (weights from memory: the state a model's layer is in when its turn comes), and on a GPU those of graphs,
replayed, for every arm that needs no host (`clock`). Only arms that were right enter. An arm within 3 % of the fastest
counts as equal, and of equals the earlier in AUTO_ORDER comes first, so that noise does not move a table.

The budget goes round: every format has its turn at a T before any has one at the next, so that a short one leaves out
numbers of tokens, of which `auto` takes the nearest, and not formats, of which it would know nothing.
"""

import itertools
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from moe_lab.arms import ARMS, AUTO_ORDER
from moe_lab.arms.guard import unread
from moe_lab.arms.names import with_layout
from moe_lab.arms.table import own_path, write_table
from moe_lab.arms.table_file import SIZES, Row
from moe_lab.bench.cell import Settings
from moe_lab.bench.cells import Workload
from moe_lab.bench.harness import measure
from moe_lab.bench.roof import roof
from moe_lab.bench.weights import SERVED, format_label, split_format
from moe_lab.bench.workloads import SHAPES
from moe_lab.errors import LabError
from moe_lab.formats.layouts import REPACKED
from moe_lab.runs import Case, Record, Run, Status
from moe_lab.system.devices import resolve_device
from moe_lab.system.user_cache import slug

EQUAL = 1.03
ABOUT = ("driver", "torch", "triton", "commit", "moe_lab", "date")
# Where an arm has no chance and costs minutes it is not timed, up to so many tokens. One that takes token after token
# has its batched twin's bits, `table` gemv's kernels; the reference took 2.4 to 29 times the best in all 12 cells tried
# on an H200, mmq 3.8 and 4.1 times at T = 1 and 8, and gemv_mmq multiplies 8 rows and fewer as gemv does. `auto` falls
# back to the reference all the same.
EVER = 1 << 62  # tokens
HOPELESS: dict[str, dict[str, int]] = {
    "cpu": {}, "cuda": {"reference": EVER, "table": EVER, "mmq": 8, "mmq_folded": 8, "gemv_mmq": 8},
}  # fmt: skip
# Those that tell most first: one token (which also says the best layout), a full chunk, prefill; then those between.
TOKENS = {"cpu": (1, 16, 4, 64), "cuda": (1, 8, 128, 32, 512, 4, 64, 2, 16)}
# SERVED, and what else the arms multiply.
FORMATS = (*SERVED, "nvfp4", "q5_k", "q4_0", "int4_g64", "int8_g64", "nvfp4_ct", "mxfp8")


def tune(
    device: str = "cpu",
    *,
    models: Sequence[str] = (),
    formats: Sequence[str] | None = None,
    tokens: Sequence[int] | None = None,
    settings: Settings | None = None,
    folder: str | Path | None = None,
) -> tuple[Run, Path]:
    """Measure the roof again and every arm that has a chance on the named shapes (none: all, on a CPU lab-42m alone),
    and write the table: the user's own, or `<folder>/<device>.json`, at the end and also where the work is
    interrupted. LabError when nothing passed, which leaves the old table.
    """
    where = resolve_device(device)
    top = roof(where, again=True)
    asked = Workload(
        subject=tuple(models) or (tuple(SHAPES) if where.type == "cuda" else ("lab-42m",)),
        formats=tuple(formats) if formats else FORMATS,
        tokens=tuple(tokens) if tokens else TOKENS[where.type], device=device,
    )  # fmt: skip
    path = own_path(top.device) if folder is None else Path(folder) / f"{slug(top.device)}.json"
    runs: list[Run] = []
    try:
        for run in _in_turns(asked, where.type, replace(settings or Settings(), states=("cold",))):
            runs.append(run)
    finally:
        rows = table_rows(r for run in runs for r in _whole(run, where.type))
        if rows:
            known = {**runs[0].environment, "date": runs[0].date}
            write_table(path, top.device, rows, {name: known[name] for name in ABOUT})
    if not rows:
        raise LabError("nothing was right and timed within the budget, so no table was written.")
    return replace(runs[0], records=[r for run in runs for r in run.records]), path


def _whole(run: Run, device: str) -> list[Record]:
    """Records of the T at which every arm had its turn: where the budget ran out, who was timed would win unopposed."""
    seen = Counter(r.case.tokens for r in run.records)
    whole = {t for t, count in seen.items() if t is not None and count == len(tuned(device, int(t)))}
    return [r for r in run.records if r.case.tokens in whole]


def _in_turns(asked: Workload, device: str, settings: Settings) -> Iterator[Run]:
    """A run for each T, shape and format that fit, all within one budget."""
    begin, formats, tokens = time.perf_counter(), asked.formats, asked.tokens
    assert isinstance(formats, tuple)
    assert isinstance(tokens, tuple)
    for t, subject, format in itertools.product(tokens, asked.subjects, formats):
        left = settings.budget_s - (time.perf_counter() - begin)
        if left <= 0:
            about = f"{subject} in {format} at T={t} and on"
            warnings.warn(f"the budget of {settings.budget_s:g} s left out {about}.", stacklevel=4)
            return
        one = replace(asked, subject=subject, formats=(format,), tokens=(t,))
        yield measure(one, tuned(device, t), replace(settings, budget_s=left))[0]


def tuned(device: str, tokens: int = 1024) -> tuple[str, ...]:
    """Names of the arms that are timed at T = `tokens` (left out: at a large one) on a "cpu" or a "cuda" device, where
    kernels read other layouts also those."""
    batched = [name for name, arm in ARMS.items() if not getattr(arm, "per_token", False)]
    names = [name for name in batched if HOPELESS[device].get(name, 0) < tokens]
    layouts = REPACKED if device == "cuda" else ()  # elsewhere torch decodes raw blocks whatever the layout
    return (*names, *(with_layout(n, layout) for layout in layouts for n in names if unread(ARMS[n], layout) is None))


def table_rows(records: Iterable[Record]) -> list[Row]:
    """A row for each case and format in which an arm passed, arms fastest first."""
    groups: dict[tuple[Case, str], list[Record]] = {}
    for r in records:
        if r.status is Status.PASSED and r.spread is not None:
            groups.setdefault((r.case, r.format), []).append(r)
    return [_row(case, format, passed) for (case, format), passed in groups.items()]


def _row(case: Case, format: str, passed: list[Record]) -> Row:
    def ms(r: Record) -> float:
        assert r.spread is not None
        return r.spread.p50

    best = min(ms(r) for r in passed)

    def order(r: Record) -> tuple[float, int, float]:
        rank = AUTO_ORDER.index(r.arm) if r.arm in AUTO_ORDER else len(AUTO_ORDER)
        return (best if ms(r) <= EQUAL * best else ms(r)), rank, ms(r)

    ranked = sorted(passed, key=order)
    gate_up, down = (format_label(part) for part in split_format(format))
    sizes = {name: int(getattr(case, name)) for name in SIZES}
    return Row(
        (gate_up, gate_up, down), **sizes, arms=tuple(r.arm for r in ranked), ms=tuple(round(ms(r), 6) for r in ranked),
    )  # fmt: skip
