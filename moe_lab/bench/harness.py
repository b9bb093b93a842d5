"""`lab.bench`: arms side by side on one layer or on the fixed workloads, checked first, timed only if right.

Every arm gets one record for each case and state: PASSED with its times, INCORRECT with its error and no time,
UNSUPPORTED, OOM or ERROR with the reason. Only a mistake in the call itself raises; otherwise the harness goes on.
"""

import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_lab._types import Float, Tensor
from moe_lab.arms import Arm
from moe_lab.bench.cell import Cell, Settings
from moe_lab.bench.cells import Format, Planned, Subject, Workload, planned
from moe_lab.bench.failures import give_back, status_of
from moe_lab.bench.measure_arm import arm_name, expect_arms, measure_arm
from moe_lab.bench.peers import peer_rows
from moe_lab.bench.roof import Roof, roof
from moe_lab.bench.workloads import Popularity
from moe_lab.errors import LabError, MissingExtra
from moe_lab.layer import Options
from moe_lab.routing import Routing
from moe_lab.runs import Record, Run, Status, measured
from moe_lab.runs.run import expect_folder
from moe_lab_kernels.backend import backend_of

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_ARMS = ("reference", "gemv")


def bench(
    subject: Subject | Sequence[Subject],
    x: Float[Tensor, "T D"] | None = None,
    arms: Sequence[str | Arm] = DEFAULT_ARMS,
    *,
    tokens: int | Sequence[int] | None = None,
    formats: Format | Sequence[Format] | None = None,
    popularity: Popularity = "uniform",
    routing: Routing | None = None,
    options: Options | None = None,
    device: str | None = None,
    name: str = "",
    model: str = "",
    settings: Settings | None = None,
    peers: bool = False,
    save: str | Path | None = None,
) -> "pd.DataFrame":
    """Measure `arms` (names or objects) on a layer or on named workloads; a row an (arm, case, state).

    `subject` to `model`: see `Workload`; `settings`: how hard to measure. Columns: those of a run's frame, then
    `source` ("measured", or "recorded" for the rows of other engines that `peers` adds) and `device`; times in `unit`.
    `save`: a folder for the Run; its path is then in `.attrs["saved"]`. `.attrs["left_out"]` lists what the budget was
    too short for. LabError or LabTypeError for arms, formats or options that do not exist.
    """
    try:
        import pandas  # noqa: F401, before minutes of measuring
    except ImportError as e:
        raise MissingExtra("pandas", "lab", "lab.bench") from e
    if save is not None:
        expect_folder(save)  # before minutes of measuring
    workload = Workload(
        subject=subject, x=x, routing=routing, tokens=tokens, formats=formats, popularity=popularity, device=device,
        name=name, model=model, options=options or Options(),
    )  # fmt: skip
    run, left_out = measure(workload, arms, settings)
    frame = run.frame.assign(source="measured", device=run.environment["device"])
    frame = with_peers(frame, run) if peers else frame
    frame.attrs["left_out"] = left_out
    if save is not None:
        frame.attrs["saved"] = str(run.save(save))
    return frame


def with_peers(frame: "pd.DataFrame", run: Run) -> "pd.DataFrame":
    """The frame and, after it, other engines' recorded rows for the same cases."""
    import pandas as pd

    rows = peer_rows([(r.case, r.format) for r in run.records])
    beside = pd.DataFrame(rows, columns=frame.columns).astype(frame.dtypes.to_dict())
    return pd.concat([frame, beside], ignore_index=True) if rows else frame


def measure(
    workload: Workload, arms: Sequence[str | Arm] = DEFAULT_ARMS, settings: Settings | None = None
) -> tuple[Run, list[str]]:
    """The Run that `bench` shows, and what its budget left out, in words."""
    settings = settings or Settings()
    expect_arms(arms)
    top: Roof | None = None
    records: list[Record] = []
    left_out: list[str] = []
    begin = time.perf_counter()

    def late() -> bool:
        return time.perf_counter() - begin > settings.budget_s

    for plan in planned(workload, settings):
        if plan.refused is None and late():
            left_out += [f"{plan.label}, {arm_name(arm)}" for arm in arms]
            continue
        cell = _built(plan)
        if not isinstance(cell, Cell):
            status, reason = cell
            records += [_without_cell(plan, arm, status, reason) for arm in arms]
            continue
        top = roof(plan.device) if top is None else top
        with torch.no_grad():
            for arm in arms:
                if late():
                    left_out.append(f"{plan.label}, {arm_name(arm)}")
                else:
                    records += measure_arm(cell, arm, settings, top)
        del cell  # its weights go before the next one's are made
    if left_out:
        about = f"the budget of {settings.budget_s:g} s left out {len(left_out)} measurements, from {left_out[0]} on"
        warnings.warn(f"{about}; Settings(budget_s=...) gives more.", stacklevel=3)
    return _run(records, workload, arms, settings, top), left_out


def _built(plan: Planned) -> Cell | tuple[Status, str]:
    """The cell, or how the attempt ended. LabError is the caller's own mistake and passes through."""
    if plan.refused is not None:
        return Status.UNSUPPORTED, plan.refused
    try:
        return plan.build()
    except LabError:
        raise
    except Exception as e:
        ended = status_of(e)
    give_back()
    return ended


def _without_cell(plan: Planned, arm: str | Arm, status: Status, reason: str) -> Record:
    backend = backend_of(torch.empty(0, device=plan.device))
    return Record(
        what="layer", case=plan.case, arm=arm_name(arm), format=plan.format, backend=backend, status=status,
        reason=reason,
    )  # fmt: skip


def _run(
    records: Sequence[Record], workload: Workload, arms: Sequence[str | Arm], settings: Settings, top: Roof | None
) -> Run:
    environment = measured()
    if top is not None:
        environment |= {"device": top.device, "roof_read_gb_per_s": f"{top.read_gb_per_s:.4g}"}
        environment |= {f"roof_{kind}_tflops": f"{rate:.4g}" for kind, rate in top.tflops.items()}
        environment |= {"roof_launch_us": f"{top.launch_us:.3g}", "roof_eager_us": f"{top.eager_us:.3g}"}
    names = [s if isinstance(s, str) else getattr(s, "name", repr(s)) for s in workload.subjects]
    options = {**asdict(settings), "arms": [arm_name(a) for a in arms], "popularity": workload.popularity}
    about = asdict(workload.options)
    shared = workload.options.shared_arm
    about["shared_arm"] = shared if shared is None else arm_name(shared)
    return Run(
        "bench", tuple(records), workload=", ".join(names), options={**options, "layer": about}, seed=settings.seed,
        environment=environment,
    )  # fmt: skip
