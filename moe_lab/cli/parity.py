"""`moe-lab parity`: arms of a model's layers on the same rows and picks, and whether they stay within a budget."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

from moe_lab.activations import Inputs
from moe_lab.cli.run import layer_numbers
from moe_lab.errors import LabError
from moe_lab.layer import MoELayer
from moe_lab.open import Checkpoint
from moe_lab.open import open as open_checkpoint
from moe_lab.parity.carry import Tokens, tokens_of, walk
from moe_lab.parity.comparison import compare
from moe_lab.parity.next_layer import NextLayer
from moe_lab.parity.report import ParityReport
from moe_lab.parity.stored import OTHER, formats_said, on
from moe_lab.runs import Status
from moe_lab.system.devices import resolve_device

BOUNDED = ("nmse_ab", "nmse_a", "nmse_b", "max_ulp", "p999_ulp", "flip_share")
SHOWN = {"nmse_ab": ".1e", "nmse_a": ".1e", "nmse_b": ".1e", "equal_share": ".1%", "flip_share": ".2%"}
TOKENS, FLIP_TOKENS = 512, 256
Rows = list[dict[str, Any]]


def parity_rows(
    file: Path,
    *,
    layer: str,
    arms: str,
    tokens: int | None,
    budget: str | None,
    recorded: Path | None,
    device: str,
    why: bool,
    as_json: bool,
    other: Path | None = None,
    truth: Path | None = None,
) -> tuple[Rows, list[str], bool]:
    """A row a layer and pair of arms, notes, and whether the budget holds (True without one)."""
    names = [part.strip() for part in arms.split(",") if part.strip()]
    if len(names) < 2 and other is None:
        raise LabError(f"--arms {arms}: wanted two or more with commas, such as gemv,mmq.")
    if tokens == 0:
        raise LabError("--tokens 0: there is nothing to compare; wanted at least one row.")
    resolve_device(device)
    bounds = parse_budget(budget)
    with open_checkpoint(file) as ckpt, _opened(other) as second, _opened(truth) as true:
        numbers = layer_numbers(ckpt, layer)
        assert ckpt.spec is not None
        inputs = Inputs(file, ckpt.spec.d_model, TOKENS if tokens is None else tokens, recorded)
        if tokens is None and inputs.recorded is not None:
            inputs.tokens = min(TOKENS, inputs.recorded.tokens)
        text = tokens_of(ckpt, inputs, FLIP_TOKENS) if device == "cpu" else None
        if text is None and "flip_share" in bounds:
            raise LabError(
                "--budget flip_share needs recorded rows with token ids, a GGUF model whose attention the lab "
                "computes, and the CPU."
            )
        reports, reasons = {}, []
        for number in numbers:
            x = inputs.layer(number).to(device)
            more = {"other": second, "truth": true}
            sides = {name: file.layer(number, device=device) for name, file in more.items() if file is not None}
            reports[number] = _compared(number, ckpt.layer(number, device=device), x, names, sides)
            reasons += [f"layer {number}: {line}" for line in why_lines(reports[number])] if why else []
        flips, said = _flip_shares(ckpt, numbers, reports, second, text)
        rows = [row for number, report in reports.items() for row in _rows(number, report, flips)]
    broken = [line for row in rows for line in over(row, bounds)]
    notes = [inputs.about, said, *_weights_said(reports, other), *reasons, *broken]
    return (rows if as_json else [shown(row) for row in rows]), notes, not broken


def _opened(file: Path | None) -> AbstractContextManager[Checkpoint | None]:
    return nullcontext() if file is None else open_checkpoint(file)


def _weights_said(reports: dict[int, ParityReport], other: Path | None) -> list[str]:
    """Where sides have weights of their own: whose the errors are against, and what `other` is."""
    report = next(iter(reports.values()))
    if not report.given.layers and report.given.truth is None:
        return []
    sides = [f"{arm} has {formats_said(layer)}" for arm, layer in report.given.layers.items()]
    file = [] if other is None else [f":{OTHER} is {other}"]
    return [f"nmse_a and nmse_b against {report.against}; " + ", ".join([*file, *sides])]


def _compared(number: int, layer: MoELayer, x: Any, names: list[str], sides: dict[str, Any]) -> ParityReport:
    """The report of arms that all ran. LabError with the first one's reason else: a budget must not hold by absence."""
    try:
        report = compare(layer, x, names, **sides)
    except LabError as error:
        if not sides:
            raise
        raise LabError(f"layer {number}: {error}") from error
    for row in report.checks.to_dict("records"):
        if row["status"] in (Status.UNSUPPORTED, Status.ERROR, Status.OOM):
            raise LabError(f"layer {number}: {row['arm']} is {row['status']}: {row['reason']}")
    return report


def parse_budget(text: str | None) -> dict[str, float]:
    """ "1e-4" bounds nmse_ab; "nmse_b=5e-4,max_ulp=3" the columns it names. LabError for other words."""
    bounds: dict[str, float] = {}
    for part in (text or "").split(","):
        name, _, value = part.strip().rpartition("=")
        if not part.strip():
            continue
        name = name or "nmse_ab"
        try:
            bound = float(value)
        except ValueError:
            bound = float("nan")
        if name not in BOUNDED or not bound >= 0:
            raise LabError(f"--budget {text}: wanted a number for nmse_ab, or NAME=NUMBER of {', '.join(BOUNDED)}.")
        bounds[name] = bound
    if text is not None and not bounds:
        raise LabError(f"--budget {text!r} holds no bound: wanted a number, or NAME=NUMBER of {', '.join(BOUNDED)}.")
    return bounds


def over(row: dict[str, Any], bounds: dict[str, float]) -> list[str]:
    """What a row breaks, in words; NaN breaks every bound."""
    where = f"layer {row['layer']}, {row['arm_a']} against {row['arm_b']}"
    broken = {name: bound for name, bound in bounds.items() if not row[name] <= bound}
    return [f"budget broken: {where}: {name} is {row[name]:.3g}, above {bound:.3g}" for name, bound in broken.items()]


def why_lines(report: ParityReport) -> list[str]:
    """The attribution of the first pair, and the hazards found."""
    df: Any = report.attribution
    total = df.attrs["nmse_ab"]
    parts = df[df["differs"]].sort_values("share", ascending=False)
    shares = ", ".join(f"({c}) {name} {s / total:.0%}" for c, name, s in parts[["choice", "name", "share"]].to_numpy())
    found: Any = report.hazards
    found = found[(found["count"] > 0) & ((found["hazard"] != "raw-sum decorrelation") | (found["factor"] >= 1.5))]
    lines = [f"{h}, {arm} {part}: {says}" for h, arm, part, says in found[["hazard", "arm", "part", "says"]].to_numpy()]
    apart = df.attrs["outputs_ab"]
    none = f"no choice differs; {apart:.1e} apart by the order of fp32 additions" if apart else "no difference"
    return [f"difference {total:.1e}: {shares} ({df.attrs['method']})" if total else none, *lines]


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """For people: errors and shares as text."""
    return {name: format(v, SHOWN[name]) if name in SHOWN and v is not None else v for name, v in row.items()}


def _rows(number: int, report: ParityReport, flips: dict[tuple[int, str, str], float]) -> Rows:
    shared = dict(zip(report.checks["arm"], report.checks["shared_arm"], strict=True))
    rows = []
    for row in report.table.to_dict("records"):
        a, b = row["arm_a"], row["arm_b"]
        more = {"flip_share": flips.get((number, a, b)), "shared_a": shared[a], "shared_b": shared[b]}
        rows.append({"layer": number, **row, **more, "backend": report.backend})
    return rows


def _flip_shares(
    ckpt: Checkpoint,
    numbers: list[int],
    reports: dict[int, ParityReport],
    other: Checkpoint | None,
    tokens: Tokens | None,
) -> tuple[dict[tuple[int, str, str], float], str]:
    """By (layer, arm, arm): the share of tokens whose picks in the next layer differ; and a sentence about it."""
    if tokens is None:
        return {}, "flips in the next layer: unknown (they need recorded token ids and a model that can be run on)"
    found = {}
    for number, layer, rows, after in _along(ckpt, numbers, tokens):
        second = None if other is None else other.layer(number)
        picks, arms = layer.route(rows), list(reports[number].outputs)
        outs = {name: own(rows, arm, routing=picks).out for name in arms for own, arm in (on(layer, name, second),)}
        for a, b in combinations(arms, 2):
            flipped: Any = after.flips(outs[a], outs[b])["flipped"]
            found[number, a, b] = float(flipped.mean())
    count = len(tokens.ids)
    return found, f"flips: {count} recorded token ids run through the model, {_texts(len(tokens.texts))}"


def _along(ckpt: Checkpoint, numbers: list[int], tokens: Tokens) -> Iterator[tuple[int, MoELayer, Any, NextLayer]]:
    """(number, layer, rows, next layer) for those of `numbers` that have a next layer."""
    have = [n for n in numbers if n + 1 in ckpt.moe_layers]
    for here in walk(ckpt, *tokens):
        if not have or here.number > max(have):
            return
        if here.number in have:
            yield here.number, ckpt.layer(here.number), here.rows, NextLayer(ckpt.layer(here.number + 1), here)


def _texts(count: int) -> str:
    return "1 text" if count == 1 else f"{count} texts"
