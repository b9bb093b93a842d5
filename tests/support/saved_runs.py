"""Runs to test with: made up with known spreads, and an H200's as the recorded tables of benchmarks/ give it."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_lab.bench.workloads import SHAPES
from moe_lab.plots.runs import COLUMNS
from moe_lab.runs import Case, Record, Run, Spread, Status, runs

if TYPE_CHECKING:
    import pandas as pd

H200 = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200" / "first_timings.csv"
LAPTOP = {
    "device": "A laptop", "backend": "torch", "driver": "none", "python": "3.11.2", "torch": "2.13.0",
    "triton": "3.7.1", "numpy": "2.0.0",
    "moe_lab": "0.1.0", "commit": "aaaaaaa", "dirty": "no", "threads": "1", "system": "Linux x86_64",
}  # fmt: skip
DATE = "2026-01-31T12:00:00Z"


def passed(
    tokens: int = 8, arm: str = "gemv", *, ms: float = 1.0, n: int = 40, noise: float = 0.01, draw: int = 0, **more: Any
) -> Record:
    """A PASSED record whose n samples scatter around `ms` by `noise` (a share), drawn from `draw`."""
    samples = ms * np.random.default_rng(draw).normal(1.0, noise, n)
    shape = SHAPES["qwen3-30b-a3b"]
    record = Record(
        what="layer",
        case=Case(
            workload="uniform", model=shape.name, d_model=shape.d_model, d_expert=shape.d_expert,
            experts=shape.experts, top_k=shape.top_k, tokens=tokens, state="warm",
        ),
        arm=arm, format="q2_k+q3_k", backend="torch", status=Status.PASSED, spread=Spread.of(samples),
        error=3e-5, error_measure="NMSE against reference", predicted=0.9 * ms, floor=0.5 * ms, method="host clock",
    )  # fmt: skip
    return replace(record, **more)


def ended(status: Status, tokens: int = 8, arm: str = "mine", reason: str = "said so", **more: Any) -> Record:
    """A record of any other status."""
    error = {"error": 0.5, "error_measure": "NMSE against reference"} if status is Status.INCORRECT else {}
    return replace(
        passed(tokens, arm), status=status, spread=None, predicted=None, floor=None, method="", reason=reason,
        **({"error": None, "error_measure": ""} | error | more),
    )  # fmt: skip


def run(*records: Record, environment: dict[str, str] | None = None, **more: Any) -> Run:
    """A laptop's run of these records."""
    env = {**LAPTOP, **(environment or {})}
    return Run("bench", records, **({"workload": "qwen3-30b-a3b", "seed": 0, "date": DATE, "environment": env} | more))


def h200_run() -> Run:
    """The checked rows of the H200's first timings, with the machine that the table names."""
    with H200.open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] in SHAPES and row["nmse"]]
    environment = {name: rows[0][name] for name in ("device", "driver", "torch", "triton", "commit")}
    environment |= {"backend": "cuda", "moe_lab": "0.1.0"}
    records = [_h200_record(row) for row in rows]
    return Run("first-timings", records, workload="uniform picks", seed=0, date=DATE, environment=environment)


def _h200_record(row: dict[str, str]) -> Record:
    shape = SHAPES[row["model"]]
    case = Case(
        workload="uniform", model=shape.name, d_model=shape.d_model, d_expert=shape.d_expert, experts=shape.experts,
        top_k=shape.top_k, tokens=int(row["T"]), state="cold",
    )  # fmt: skip
    spread = Spread(**{p: float(row[f"us_{p}"]) for p in ("p20", "p50", "p80")}, n=int(row["n"]))
    return Record(
        what=row["what"], case=case, arm="gemv", format=row["format"], backend="cuda", status=Status.PASSED, unit="us",
        spread=spread, error=float(row["nmse"]), error_measure="NMSE", floor=float(row["floor_us"]),
        method=row["method"],
    )  # fmt: skip


def two_machines() -> "pd.DataFrame":
    """The columns that lab.plot.runs draws, of a laptop's run and an H200's; the GPU takes a hundredth of the time."""
    cases = [passed(tokens, arm) for tokens in (1, 8) for arm in ("gemv", "reference")]
    gpu = [passed(r.case.tokens or 0, r.arm, ms=0.01, backend="cuda") for r in cases]
    there = {"device": "NVIDIA H200", "backend": "cuda"}
    return runs([run(*cases), run(*gpu, environment=there)]).reindex(columns=list(COLUMNS))
