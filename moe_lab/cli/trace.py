"""`moe-lab trace`: what a routing trace holds, its last token, and the trace of a model on recorded activations."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_lab.activations import Inputs, require_recorded
from moe_lab.errors import LabError
from moe_lab.open import open as open_checkpoint
from moe_lab.stream.cache import ExpertCache
from moe_lab.trace import NO_PICK, RoutingTrace, TraceWriter, read_last, scan, summarize
from moe_lab.trace.record import READERS
from moe_lab.trace.writer import SUFFIXES

Rows = list[dict[str, Any]]


def trace_rows(
    file: Path,
    *,
    last: bool,
    recorded: Path | None,
    out: Path | None,
    num_experts: int | None,
    as_json: bool,
) -> tuple[Rows, list[str]]:
    """Rows and notes: a row a layer (see moe_lab.trace.summary), or with `last` the last token's picks a layer.

    A file with a trace's suffix is read; any other is opened as a model, whose routers then run on `recorded`. `out`:
    also written there, as Parquet. In JSON each row carries what the whole trace is.
    """
    if num_experts is not None and num_experts < 1:
        raise LabError(f"--experts {num_experts}: wanted 1 or more.")
    if file.suffix.lower() not in READERS:
        if num_experts is not None:
            raise LabError(f"--experts: {file} is a model, which says itself how many it has.")
        pieces: Iterable[RoutingTrace] = [record_model(file, recorded)]
    elif recorded is not None:
        raise LabError(f"--input: {file} is a trace already; activations go with a model file.")
    else:
        pieces = _pieces(file, num_experts, last=last and out is None)
    if out is not None:
        if out.suffix.lower() not in SUFFIXES:
            raise LabError(f"--out {out}: traces are written as .parquet.")
        pieces = _copied(pieces, out)
    if last:
        return _last(pieces, as_json), []
    about, rows = summarize(pieces)
    notes = [f"{name}: {value}" for name, value in about.items()] + ([f"written: {out}"] if out else [])
    return [{**about, **row} for row in rows] if as_json else rows, notes


def record_model(file: Path, recorded: Path | None) -> RoutingTrace:
    """The picks of all MoE layers of a model file on recorded activations, margins with them. No expert is read."""
    with ExitStack() as stack:
        ckpt = stack.enter_context(open_checkpoint(file))
        if ckpt.spec is None:
            raise LabError(f"{file} holds no MoE layer.")
        inputs = Inputs(file, ckpt.spec.d_model, 0, recorded)
        require_recorded(inputs, f"the routing of {file}")
        source = inputs.recorded
        assert source is not None
        cache = stack.enter_context(ExpertCache(slots=1))
        token_ids = None if source.token_ids is None else torch.from_numpy(source.token_ids.astype(np.int64))
        ids, weights, margins = {}, {}, []
        for number in ckpt.moe_layers:
            layer, x = ckpt.layer(number, cache=cache), source.layer(number)
            routing = layer.route(x, token_ids)
            ids[number], weights[number] = routing.ids.numpy(), routing.weights.numpy()
            margins.append(layer.margin(x).numpy())
        router = ckpt.spec.router
        return RoutingTrace.from_layers(
            ids, weights, num_experts=router.num_experts, width=router.width, model_hash=ckpt.model_hash,
            token_ids=None if source.token_ids is None else source.token_ids.astype(np.int32),
            domains=source.domains, margin=np.stack(margins, 1),
        )  # fmt: skip


def _pieces(file: Path, num_experts: int | None, *, last: bool) -> Iterable[RoutingTrace]:
    """A trace file in pieces; the last token alone where no more is asked for."""
    if READERS[file.suffix.lower()] != "parquet":
        return [RoutingTrace.load(file, num_experts=num_experts)]
    return [read_last(file, num_experts=num_experts)] if last else scan(file, num_experts=num_experts)


def _copied(pieces: Iterable[RoutingTrace], out: Path) -> Iterator[RoutingTrace]:
    """The same pieces, written on the way."""
    with TraceWriter(out) as writer:
        for piece in pieces:
            writer.append(piece)
            yield piece


def _last(pieces: Iterable[RoutingTrace], as_json: bool) -> Rows:
    piece: RoutingTrace | None = None
    for piece in pieces:  # noqa: B007
        pass
    assert piece is not None
    rows = piece.last_token().to_dict("records")
    for row in rows:
        row["ids"] = [None if i == NO_PICK else i for i in row["ids"]]
        row["weights"] = row["weights"] if piece.has_weights else None
    return rows if as_json else [{name: _shown(value) for name, value in row.items()} for row in rows]


def _shown(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return " ".join("-" if v is None else f"{v:.4f}" if isinstance(v, float) else str(v) for v in value)
