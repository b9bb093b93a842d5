"""Many runs as one frame: what was measured where, a row a record."""

import glob
from collections.abc import Iterable, Sequence
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_lab.errors import LabError, LabTypeError, MissingExtra
from moe_lab.runs.columns import COLUMNS
from moe_lab.runs.run import Run
from moe_lab.runs.store import SUFFIX

if TYPE_CHECKING:
    import pandas as pd

Source = str | Path | Run
ENVIRONMENT = (
    "device", "driver", "python", "torch", "triton", "numpy", "moe_lab", "commit", "dirty", "threads", "system",
    "run_backend",
)  # fmt: skip


def runs(source: Source | Sequence[Source] = "runs/*") -> "pd.DataFrame":
    """Saved runs as one frame: `run` (its label), the columns of a record, date, seed, and a column for each name in
    the environments (`run_backend` for the run's own backend).

    `source`: a pattern, a file, a folder (all its .parquet files), a Run, or several of these. LabError when nothing
    matches, and for files that are no runs: all of them are named, none is skipped.
    """
    try:
        import pandas as pd
    except ImportError as e:
        raise MissingExtra("pandas", "lab", "A frame of runs") from e
    found = load_runs(source)
    labels = unique_labels(found)
    frames = [_frame(run, label) for run, label in zip(found.values(), labels, strict=True)]
    everywhere = {name for frame in frames for name in frame.columns}
    known = ("run", *COLUMNS, "date", "seed", *ENVIRONMENT)
    order = [name for name in known if name in everywhere] + sorted(everywhere - {*known})
    return pd.concat([frame.reindex(columns=order) for frame in frames], ignore_index=True)


def load_runs(source: Source | Sequence[Source]) -> dict[str, Run]:
    """{path, or label of a Run that was handed over: Run}, each once, in the order given."""
    sources = [source] if isinstance(source, str | Path | Run) else list(source)
    found: dict[str, Run] = {}
    bad: list[str] = []
    for one in sources:
        if isinstance(one, Run):
            found.setdefault(one.label, one)
            continue
        for path in _paths(one):
            if str(path) in found:
                continue
            try:
                found[str(path)] = Run.load(path)
            except LabError as e:
                bad.append(str(e))
    if len(bad) == 1:
        raise LabError(bad[0])
    if bad:
        rest = f" (and {len(bad) - 5} more)" if len(bad) > 5 else ""
        raise LabError(f"{len(bad)} of {len(bad) + len(found)} files are no readable runs: {' | '.join(bad[:5])}{rest}")
    if not found:
        raise LabError("no run was named; give a pattern, files or Runs.")
    return found


def unique_labels(found: dict[str, Run]) -> list[str]:
    """The runs' labels; where two files have one name, their paths instead."""
    labels = [run.label for run in found.values()]
    return [
        label if labels.count(label) == 1 else key.removesuffix(SUFFIX)
        for key, label in zip(found, labels, strict=True)
    ]  # fmt: skip


def _paths(pattern: Any) -> Iterable[Path]:
    if not isinstance(pattern, str | Path):
        raise LabTypeError(f"runs come from patterns, paths and Runs, got {type(pattern).__name__}.")
    text = expanduser(str(pattern))
    # A file whose name holds [brackets] is itself before it is a pattern.
    matches = [Path(text)] if Path(text).exists() else sorted(Path(name) for name in glob.glob(text, recursive=True))
    paths = [path for match in matches for path in (sorted(match.glob(f"*{SUFFIX}")) if match.is_dir() else [match])]
    if not paths:
        raise LabError(f"no run matches {text!r}; Run.save writes <folder>/*{SUFFIX}.")
    return paths


def _frame(run: Run, label: str) -> "pd.DataFrame":
    environment = {("run_backend" if name == "backend" else name): text for name, text in run.environment.items()}
    frame = run.frame.assign(date=run.date, seed=run.seed, **environment)
    frame.insert(0, "run", label)
    return frame.astype({"seed": "Int64"})
