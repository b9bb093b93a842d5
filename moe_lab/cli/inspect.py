"""`moe-lab inspect`: a model's MoE layers, their formats and bytes, and what fits in which memory."""

import math
from pathlib import Path
from typing import Any

from moe_lab.errors import LabError
from moe_lab.inspect import inspect_checkpoint, memory, summary
from moe_lab.layouts import TIMES, layout_rows
from moe_lab.open import open as open_checkpoint

IN_NOTES = ("family", "router", "activation", "shared")  # columns that the notes on the whole file have too


def inspect_file(file: Path, gib: str | None, *, as_json: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows, one a MoE layer with a column of slots for each size in `gib`, and notes on the whole file.

    For programs a file without MoE layers is one row, its summary; in a table that would be the notes again.
    """
    sizes = gibs(gib)
    with open_checkpoint(file) as ckpt:
        about, fits = summary(ckpt), memory(ckpt, sizes)
        rows = inspect_checkpoint(ckpt).to_dict("records")
    slots = {f"slots_{fit['gib']:g}gib": fit["slots"] for fit in fits}
    notes = [f"{name}: {value}" for name, value in about.items()]
    for fit in fits if about["family"] else []:
        holds = "none: not streamable" if fit["slots"] is None else f"{fit['slots']:,}"
        share = "" if fit["share_of_experts"] is None else f" ({fit['share_of_experts']:.1%} of all experts)"
        notes.append(f"slots in {fit['gib']:g} GiB: {holds}{share}")
    if not rows:
        notes.append("no MoE layer: a dense model, or an architecture without a family")
    if not rows and as_json:
        return [about], notes
    shown = [{name: _told(value) for name, value in {**row, **slots}.items()} for row in rows]
    for name in () if as_json else IN_NOTES:
        if len({row[name] for row in shown}) == 1:
            for row in shown:  # a note says it once; here it would take half of the width
                del row[name]
    return shown, notes


def inspect_layouts(file: Path, layer: int | None, *, device: str) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each part and layout of one expert of `layer` (default: the first MoE layer), and notes."""
    with open_checkpoint(file) as ckpt:
        number = layer if layer is not None else next(iter(ckpt.moe_layers), 0)
        rows = layout_rows(ckpt, number, device=device)
    note = f"expert {rows[0]['expert']} of layer {number}; decode_ms: median of {TIMES} decodings to fp32 on {device}"
    return rows, [note]


def _told(value: Any) -> Any:
    """None for what the file does not say."""
    return None if isinstance(value, float) and math.isnan(value) else value


def gibs(text: str | None) -> list[float]:
    """Sizes from "8,16,24". LabError for what is no number; ranges are checked where they are used."""
    try:
        return [float(size) for size in text.split(",")] if text is not None else []
    except ValueError as error:
        raise LabError(f"--gib {text}: wanted a size in GiB, or several with commas such as 8,16,24.") from error
