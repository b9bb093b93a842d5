"""`moe-lab bench`: arms on a model's layer or on the fixed workloads, checked before they are timed."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_lab.activations import Inputs
from moe_lab.bench.cell import Settings
from moe_lab.bench.harness import DEFAULT_ARMS, bench
from moe_lab.bench.tune import tune
from moe_lab.bench.tune_launches import tune_launches
from moe_lab.bench.workloads import SHAPES
from moe_lab.cli.run import layer_numbers
from moe_lab.errors import LabError
from moe_lab.open import open as open_checkpoint

if TYPE_CHECKING:
    import pandas as pd

SHOWN = (
    "model", "tokens", "state", "arm", "format", "status", "p50_us", "iqr_us", "p95_us", "floor_us", "predicted_us",
    "error", "method", "reason",
)  # fmt: skip
TIMES = ("p20", "p50", "p80", "p95", "iqr", "floor", "predicted")
TO_US = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
BUDGET_S = {"cpu": 60.0, "cuda": 540.0}
TILES_SHARE = 0.5  # of the budget of --tune
FILE_TOKENS = (8,)
MOST_ROTATION = 16
Rows = list[dict[str, Any]]
Answer = tuple[Rows, list[str], bool]
"""Rows in the columns of `lab.bench`, notes, and whether every arm that ran was right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command's options as they were typed."""

    model: str | None = None
    file: Path | None = None
    layer: str = "all"
    arms: str | None = None
    formats: str | None = None
    tokens: str | None = None
    picks: str = "uniform"
    device: str | None = None
    peers: bool = False
    budget_s: float | None = None
    shrink: int | None = None
    save: Path | None = None
    recorded: Path | None = None
    table: Path | None = None

    @property
    def title(self) -> str:
        """What is measured."""
        return f"{self.file or self.model or 'auto'}, {self.where}"

    @property
    def where(self) -> str:
        """The device: a file's is the CPU unless named, a shape's the GPU where there is one."""
        return self.device or ("cuda" if self.file is None and torch.cuda.is_available() else "cpu")

    @property
    def settings(self) -> Settings:
        """How hard to measure."""
        default = BUDGET_S.get(self.where.split(":")[0], 60.0)
        return Settings(budget_s=self.budget_s if self.budget_s is not None else default, shrink=self.shrink)


def names(text: str | None) -> tuple[str, ...] | None:
    """Names from "a,b"."""
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    """Whole numbers from "1,8,64". LabError for anything else."""
    found = names(text)
    if found is not None and not all(part.isascii() and part.isdigit() for part in found):
        raise LabError(f"{option} {text}: wanted a whole number, or several with commas such as 1,8,64.")
    return None if found is None else tuple(int(part) for part in found)


def run_bench(asked: Asked) -> Answer:
    """Measure; warnings, as of a budget too short, become notes."""
    return _with_warnings(_bench, asked)


def run_tune(asked: Asked) -> Answer:
    """Measure what `auto` will take here and write the table."""
    return _with_warnings(_tune, asked)


def _with_warnings(command: Callable[[Asked], Answer], asked: Asked) -> Answer:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows, notes, ok = command(asked)
    return rows, [*notes, *dict.fromkeys(f"{w.category.__name__}: {w.message}" for w in caught)], ok


def _bench(asked: Asked) -> Answer:
    if asked.picks not in ("uniform", "zipf"):
        raise LabError(f"--picks {asked.picks}: wanted uniform or zipf.")
    if (asked.file is None) == (asked.model is None):
        raise LabError(f"wanted --file FILE or --model NAME, one of them; names: {', '.join(SHAPES)}, all.")
    if asked.table is not None:
        raise LabError("--table goes with --tune.")
    given: dict[str, Any] = {
        "arms": names(asked.arms) or DEFAULT_ARMS, "peers": asked.peers, "settings": asked.settings, "save": asked.save,
        "tokens": numbers(asked.tokens, "--tokens"),
    }  # fmt: skip
    if asked.file is not None:
        frame = _bench_file(asked, asked.file, given)
    else:
        shapes = tuple(SHAPES) if asked.model == "all" else names(asked.model) or ()
        about = {"formats": names(asked.formats), "popularity": asked.picks, "device": asked.device}
        frame = bench(shapes, **about, **given)  # type: ignore[arg-type]
    return _rows(frame), _notes(frame), not {*frame["status"]} & {"INCORRECT", "ERROR"}


def _tune(asked: Asked) -> Answer:
    if asked.file is not None or asked.arms is not None:
        raise LabError("--tune times all arms on shapes: it takes no --file and no --arms.")
    begin, settings = time.perf_counter(), asked.settings
    tiles = _tune_tiles(asked)  # first: an arm's time depends on them
    left = max(settings.budget_s - (time.perf_counter() - begin), settings.budget_s * (1 - TILES_SHARE))
    run, path = tune(
        asked.where, models=names(asked.model) or (), formats=names(asked.formats),
        tokens=numbers(asked.tokens, "--tokens"), settings=replace(settings, budget_s=left), folder=asked.table,
    )  # fmt: skip
    frame = run.frame.assign(source="measured", device=run.environment["device"])
    saved = [f"saved: {run.save(asked.save)}"] if asked.save is not None else []
    ok = not {*frame["status"]} & {"INCORRECT", "ERROR"}
    return _rows(frame), [tiles, f"auto goes by {path}", *saved], ok


def _tune_tiles(asked: Asked) -> str:
    """Measure how programs are cut, where compiled kernels run; what to say of it."""
    if not asked.where.startswith("cuda"):
        return f"tiles of kernels were not tuned: on {asked.where} none is compiled"
    tuned, path = tune_launches(
        asked.where, models=names(asked.model) or (), formats=names(asked.formats),
        budget_s=asked.settings.budget_s * TILES_SHARE, folder=None if asked.table is None else asked.table / "launch",
    )  # fmt: skip
    other = sum(e.us < e.default_us for e in tuned)
    return f"kernels go by {path}: {len(tuned)} tiles measured, {other} better than the built-in ones"


def _bench_file(asked: Asked, file: Path, given: dict[str, Any]) -> "pd.DataFrame":
    if asked.formats is not None or asked.picks != "uniform" or asked.shrink is not None:
        raise LabError(
            "--formats, --picks and --shrink go with --model: a file's layer has its own weights and router."
        )
    with open_checkpoint(file) as ckpt:
        found = layer_numbers(ckpt, asked.layer)
        assert ckpt.spec is not None
        tokens = given.pop("tokens") or FILE_TOKENS
        rows = Inputs(file, ckpt.spec.d_model, max(tokens), asked.recorded)
        if len(found) > 1:
            raise LabError(f"--layer {asked.layer}: one layer is measured; {file} has {', '.join(map(str, found))}.")
        most = MOST_ROTATION * max(tokens)  # rows enough for a rotation, where the recording has them
        rows.tokens = max(tokens) if rows.recorded is None else max(max(tokens), min(most, rows.recorded.tokens))
        layer = ckpt.layer(found[0], device=asked.where)
        x = rows.layer(found[0], torch.float32 if layer.device.type == "cpu" else torch.bfloat16).to(layer.device)
        name = rows.about.partition(" ")[2]  # without the number of rows: runs are paired by what the rows are
        return bench(layer, x, tokens=tokens, name=name, model=file.stem, **given)


def _rows(frame: "pd.DataFrame") -> Rows:
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def _notes(frame: "pd.DataFrame") -> list[str]:
    saved = [f"saved: {frame.attrs['saved']}"] if "saved" in frame.attrs else []
    return [f"device: {', '.join(dict.fromkeys(frame['device']))}", *saved]


def shown(rows: Sequence[dict[str, Any]]) -> Rows:
    """For people: fewer columns, times in microseconds, other engines' rows marked."""
    table = []
    for row in rows:
        us = {f"{t}_us": None if row[t] is None else row[t] * TO_US[row["unit"]] for t in TIMES}
        mark = {"arm": f"{row['arm']} (recorded)"} if row["source"] == "recorded" else {}
        cells = {**row, **us, **mark}
        cells["error"] = None if row["error"] is None else f"{row['error']:.1e}"
        table.append({name: cells[name] for name in SHOWN})
    return table
