"""One arm in one cell: asked whether it serves, checked, timed in each state, checked again."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moe_lab.arms import ARMS, Arm, get_arm, layer_tolerance
from moe_lab.arms.guard import check_arm
from moe_lab.arms.names import split_layout
from moe_lab.bench.cell import Cell, Settings
from moe_lab.bench.check import MEASURE, Judge, Verdict
from moe_lab.bench.clock import clock
from moe_lab.bench.failures import give_back, status_of
from moe_lab.bench.laid import laid
from moe_lab.bench.roof import Roof
from moe_lab.errors import LabError
from moe_lab.runs import Case, Record, Spread, Status
from moe_lab_kernels.backend import backend_of

AUTO = "auto"


def arm_name(arm: str | Arm) -> str:
    """An arm's name, whichever way it was given."""
    return arm if isinstance(arm, str) else arm.name


def expect_arms(arms: Sequence[str | Arm]) -> None:
    """LabError or LabTypeError unless these are known names (with a layout, as gemv@tiles, or without) or arms, at
    least one, none twice."""
    if isinstance(arms, str) or not arms:
        raise LabError(f"arms are {arms!r}; wanted a list of names or objects, at least one.")
    for arm in arms:
        if isinstance(arm, str) and split_layout(arm)[0] not in (AUTO, *ARMS):
            raise LabError(f"no arm is called {arm!r}; known: {AUTO}, {', '.join(ARMS)}.")
        if not isinstance(arm, str):
            check_arm(arm, ARMS)
    names = [arm_name(arm) for arm in arms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LabError(f"arm {twice[0]!r} was named twice; name each arm once.")


def measure_arm(cell: Cell, wanted: str | Arm, settings: Settings, top: Roof) -> list[Record]:
    """A record a state, or a single one that says why there is no time. Raises no error of the arm's."""
    states: tuple[str, ...] = ("",) if cell.streamed else settings.states
    backend, name = backend_of(cell.x), arm_name(wanted)
    head: dict[str, Any] = {"what": "layer", "format": cell.format, "backend": backend, "arm": name}
    try:
        layer, wanted = laid(cell.layer, wanted)
        cell, head["layout"] = replace(cell, layer=layer), layer.experts.layout
        arm = get_arm(wanted, layer.experts.formats, backend, layer.spec, cell.x.shape[1], layer.experts.layout)
    except LabError as e:
        return [Record(case=cell.case, status=Status.UNSUPPORTED, reason=" ".join(str(e).split()), **head)]
    except Exception as e:
        return [_failed(e, cell, "", head)]
    if wanted == AUTO:
        head["arm"] = f"{name} ({arm.name})"
    tolerance = settings.tolerance or layer_tolerance(arm, cell.layer.experts.formats)
    judge = Judge(cell.layer, arm, cell.x[0], cell.routings[0], cell.options, tolerance, settings.seed + 7)
    try:
        verdict = judge.check()
    except Exception as e:
        return [_failed(e, cell, "", head)]
    head |= {"shared_arm": verdict.shared_arm, "tiles": verdict.tiles}
    if verdict.reason is not None:
        return [_incorrect(cell, "", verdict.error, verdict.reason, head)]
    records = []
    for state in states:
        try:
            records.append(_timed(cell, arm, state, settings, top, judge, verdict, head))
        except Exception as e:
            records.append(_failed(e, cell, state, head))
    return records


def _timed(
    cell: Cell,
    arm: Arm,
    state: str,
    settings: Settings,
    top: Roof,
    judge: Judge,
    verdict: Verdict,
    head: dict[str, Any],
) -> Record:
    clocked = clock(cell, arm, state, settings)
    late, wrong = judge.confirm(clocked.out, clocked.x, clocked.routing)
    if wrong is not None:
        return _incorrect(cell, state, late, f"right when checked, but not while timed: {wrong}", head)
    # Warm weights come from a cache, about whose bandwidth nothing was measured: no floor, and none in the prediction.
    cold = state != "warm"
    moved = (verdict.weight_bytes if cold else 0) + cell.row_bytes
    graph, known = clocked.method.startswith("graph"), not math.isnan(moved)
    return Record(
        case=_in_state(cell, state), status=Status.PASSED, spread=Spread.of(clocked.times_ms),
        error=max(verdict.error, late), error_measure=MEASURE, method=clocked.method,
        predicted=top.predicted_ms(moved, cell.flops, verdict.launches, graph=graph) if known else None,
        floor=top.bound_ms(cell.weight_bytes + cell.row_bytes, cell.flops) if cold else None, **head,
    )  # fmt: skip


def _incorrect(cell: Cell, state: str, error: float, reason: str, head: dict[str, Any]) -> Record:
    return Record(
        case=_in_state(cell, state), status=Status.INCORRECT, error=error, error_measure=MEASURE, reason=reason, **head
    )


def _failed(error: Exception, cell: Cell, state: str, head: dict[str, Any]) -> Record:
    status, reason = status_of(error)
    give_back()
    return Record(case=_in_state(cell, state), status=status, reason=reason, **head)


def _in_state(cell: Cell, state: str) -> Case:
    return replace(cell.case, state=state)
