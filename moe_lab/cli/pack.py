"""`moe-lab pack`: the experts of a model as one file of aligned rows; and whether such a file is whole."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from moe_lab.analysis.picks import occupancy
from moe_lab.cli.progress import progress
from moe_lab.errors import LabError
from moe_lab.open import Checkpoint
from moe_lab.open import open as open_checkpoint
from moe_lab.stream.pack import Order, pack
from moe_lab.stream.packed import PackedSource, wrong_rows
from moe_lab.trace import RoutingTrace

ORDERS = ("layer", "coactivation")


def pack_file(
    file: Path, out: Path, *, order: str, trace: Path | None, quiet: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Write the packed file; a row on what was written, and notes."""
    if order not in ORDERS:
        raise LabError(f"--order {order}: wanted {' or '.join(ORDERS)}.")
    if (order == "coactivation") != (trace is not None):
        raise LabError("--order coactivation goes with --trace, the picks it is made from; --order layer without it.")
    with ExitStack() as stack:
        ckpt = stack.enter_context(open_checkpoint(file))
        if not ckpt.moe_layers:
            raise LabError(f"{file} holds no MoE layer.")
        ways = _coactivation_order(ckpt, RoutingTrace.load(trace)) if trace is not None else None
        told = None if quiet else stack.enter_context(progress("packing"))
        done = pack(ckpt.expert_source, out, order=ways, order_name=order, told=told)
    row = {
        "file": str(done.path), "experts": done.rows, "layers": len(ckpt.moe_layers), "bytes": done.nbytes,
        "seconds": done.seconds, "gb_per_s": done.nbytes / done.seconds / 1e9, "order": order,
    }  # fmt: skip
    return [row], [f"use it: moe-lab run {file} --packed {out} --cache-gib .., or lab.open({str(file)!r}, packed=..)"]


def verify_file(file: Path) -> tuple[list[dict[str, Any]], list[str], bool]:
    """Every row against its checksums: a row of output for each layer, and whether all are right."""
    source = PackedSource(file)
    wrong = list(wrong_rows(source))
    rows = [
        {
            "layer": layer, "experts": source.num_experts(layer), "row_bytes": source.span_bytes(layer),
            "wrong": sum(number == layer for number, _ in wrong),
        }
        for layer in source.layers
    ]  # fmt: skip
    checked = sum(source.num_experts(layer) for layer in source.layers)
    notes = [
        f"packed from {source.manifest.model_name}, order {source.manifest.order}",
        f"read back {checked} rows of {len(source.layers)} layers: CRC-32 of each row, SHA-256 of each expert's parts",
    ]
    if not wrong:
        notes[-1] += "; all are as they were written"
    if wrong:
        named = ", ".join(f"layer {layer} expert {expert}" for layer, expert in wrong[:4])
        notes.append(f"{len(wrong)} rows are not what was written: {named}{', ..' if len(wrong) > 4 else ''}")
    return rows, notes, not wrong


def _coactivation_order(ckpt: Checkpoint, trace: RoutingTrace) -> Order:
    """Experts of a layer in a chain: the most picked first, then always the one most often picked with the last."""
    source = ckpt.expert_source
    missing = [n for n in source.layers if n not in trace.layers]
    if missing:
        raise LabError(f"the trace has no layer {missing[0]}, which {ckpt.path} has; it has {list(trace.layers)}.")
    return {n: chain(occupancy(trace, n), source.num_experts(n)) for n in source.layers}


def chain(picks: np.ndarray, experts: int) -> list[int]:
    """The order of `experts` by picks [T, E] (whether a token picks an expert): ties by number."""
    if picks.shape[1] != experts:
        raise LabError(f"the trace counts E={picks.shape[1]} experts, the model has {experts}.")
    hot = picks.astype(np.float64)
    together = hot.T @ hot
    popular = together.diagonal()
    left = set(range(experts))
    order: list[int] = []
    while left:
        with_last = together[order[-1]] if order else popular
        order.append(min(left, key=lambda e: (-with_last[e], -popular[e], e)))
        left.discard(order[-1])
    return order
