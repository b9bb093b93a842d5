"""Other engines' recorded times beside ours: the same model, picks, tokens and format, on the machine they ran on.

A recorded row is marked so and never enters a Run, whose environment would lie about it. `recorded/README.md` says how
they were measured.
"""

import csv
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from moe_lab.bench.cell import case_of
from moe_lab.bench.workloads import SHAPES
from moe_lab.runs import Case

DEVICE = "NVIDIA H200"
MEASURE = "relative error (norm) against an fp32 reference"
# The weights' format as a peer names it -> ours. Both mxfp4 layouts hold the same bits a weight.
FORMATS = {"fp8_block128": "fp8_block", "mxfp4": "mxfp4_oss", "ggml_mxfp4": "mxfp4"}
_SAME = {"mxfp4_oss": ("mxfp4_oss", "mxfp4"), "mxfp4": ("mxfp4_oss", "mxfp4")}


@cache
def recorded() -> tuple[dict[str, str], ...]:
    """Every recorded row, columns as in recorded/README.md."""
    text = files("moe_lab.bench").joinpath("recorded/h200.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def peer_rows(cases: Iterable[tuple[Case, str]]) -> list[dict[str, Any]]:
    """Rows in the columns of `lab.bench` for the (case, format) pairs measured; none where nothing fits.

    Matched by model and its sizes, workload, tokens and format; a peer's rotation is cold.
    """
    whole = [(c, f) for c, f in cases if c.model in SHAPES and case_of(SHAPES[c.model], "", 0).shape == c.shape]
    wanted = {(c.model, c.workload, c.tokens, name): c for c, f in whole for name in _SAME.get(f, (f,))}
    rows = []
    for row in recorded():
        name = FORMATS.get(row["dtype"], row["dtype"])
        case = wanted.get((row["model"], row["routing"], int(row["m"]), name))
        if case is not None:
            rows.append(_row(row, case, name))
    return rows


def _row(row: dict[str, str], case: Case, format: str) -> dict[str, Any]:
    sizes = {name: getattr(case, name) for name in ("d_model", "d_expert", "experts", "top_k", "tokens")}
    return {
        "what": "layer", "workload": case.workload, "model": case.model, **sizes, "state": "cold", "arm": row["peer"],
        "shared_arm": "", "format": format, "backend": "cuda", "metric": "time", "unit": "ms", "status": "PASSED",
        "p50": float(row["us"]) / 1e3, "error": float(row["rel_err"]), "error_measure": MEASURE,
        "floor": float(row["floor_us"]) / 1e3, "method": f"{row['method']}, rotation of {row['rotations']}",
        "reason": "", "source": "recorded", "device": DEVICE,
    }  # fmt: skip
