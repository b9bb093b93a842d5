"""Routing of a whole model in one line: `trace = lab.hf.record(model, texts, tokenizer=tokenizer)`.

The picks are the model's own, as its experts were handed them, whatever precision its routers run in. The margin is
ours: the layer's router in float64 on the very rows that the model fed it, K-th minus (K+1)-th choice score.
"""

from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_lab.block import router_logits
from moe_lab.errors import LabError
from moe_lab.families import Family
from moe_lab.hf.module import router_from_module
from moe_lab.routing import choice_margin
from moe_lab.spec import MoESpec
from moe_lab.tap import InputTap, PickTap, TappedBlock, listening, model_hash, moe_blocks, run_texts, token_texts
from moe_lab.tap.texts import TokenText
from moe_lab.trace import RoutingTrace, TraceWriter
from moe_lab.trace.record import join_traces
from moe_lab.weights import RouterWeights


def record(
    model: torch.nn.Module,
    texts: Any,
    *,
    tokenizer: Any = None,
    max_tokens: int | None = None,
    layers: Sequence[int] | None = None,
    domains: str | Sequence[str] | None = None,
    margin: bool = True,
    family: str | Family | None = None,
) -> RoutingTrace:
    """Run `model` on `texts` and return which experts its tokens took: ids, weights, margin, token ids, domains.

    Arguments as in `lab.Activations.capture`; `max_tokens` None takes every token. `margin` False leaves margins out,
    for blocks whose router `from_module` cannot read. Margins of hash-routed layers are NaN. Memory: T * L * (4 K + 4)
    bytes; `record_to` needs that for one text alone. LabError for a model without MoE blocks that a family reads, for
    layers of different K, E or R, and for weights that are not finite.
    """
    pieces = _pieces(
        model, texts, tokenizer=tokenizer, max_tokens=max_tokens, layers=layers, domains=domains, margin=margin,
        family=family,
    )  # fmt: skip
    with closing(pieces):
        return join_traces(list(pieces))


def record_to(path: str | Path, model: torch.nn.Module, texts: Any, **options: Any) -> Path:
    """`record` with its options, written to a Parquet file text by text instead of kept; returns the path. No file
    after an error.
    """
    pieces = _pieces(model, texts, **options)
    with TraceWriter(path) as writer, closing(pieces):
        for piece in pieces:
            writer.append(piece)
    return Path(path)


def _pieces(
    model: torch.nn.Module,
    texts: Any,
    *,
    tokenizer: Any = None,
    max_tokens: int | None = None,
    layers: Sequence[int] | None = None,
    domains: str | Sequence[str] | None = None,
    margin: bool = True,
    family: str | Family | None = None,
) -> Generator[RoutingTrace, None, None]:
    """One trace a text."""
    blocks = moe_blocks(model, layers, family)
    queue = token_texts(texts, tokenizer, domains=domains, max_tokens=max_tokens)
    experts, width = _sizes(blocks)
    about = {"num_experts": experts, "width": width, "model_hash": model_hash(model)}
    routers = [router_from_module(block.module, family=block.family) for block in blocks] if margin else None
    picks = [PickTap(block) for block in blocks]
    inputs = [InputTap(block) for block in blocks] if margin else []
    with listening(*picks, *inputs), closing(run_texts(model, queue)) as runs:
        for text in runs:
            yield _piece(text, picks, inputs, routers, about)


def _sizes(blocks: Sequence[TappedBlock]) -> tuple[int, int]:
    """E and R, which must be the same in every block."""
    sizes = {b.number: (len(b.attribute(b.names.down)), len(b.attribute(b.names.router))) for b in blocks}
    if len(set(sizes.values())) > 1:
        raise LabError(f"the MoE layers differ in (E, R): {sizes}. Choose layers= that agree; a trace has one E.")
    return next(iter(sizes.values()))


def _piece(
    text: TokenText,
    picks: Sequence[PickTap],
    inputs: Sequence[InputTap],
    routers: Sequence[tuple[RouterWeights, MoESpec]] | None,
    about: dict[str, Any],
) -> RoutingTrace:
    tokens = len(text.ids)
    ids, weights = {}, {}
    for tap in picks:
        number, (picked, weighed) = tap.block.number, tap.take(tokens)
        if not bool(torch.isfinite(weighed).all()):
            raise LabError(f"the model weighs experts of layer {number} with values that are not finite.")
        ids[number], weights[number] = picked.cpu().numpy(), weighed.float().cpu().numpy()
    margins = {}
    for tap, (own, spec) in zip(inputs, routers or (), strict=True):
        logits = router_logits(tap.take(tokens), own, spec)
        margin = choice_margin(logits, spec.router, correction_bias=own.correction_bias)
        margins[tap.block.number] = margin.cpu().numpy()
    return RoutingTrace.from_layers(
        ids,
        weights,
        token_ids=text.ids.numpy().astype(np.int32),
        domains=None if text.domain is None else np.full(tokens, text.domain),
        margin=np.stack([margins[n] for n in sorted(margins)], 1) if margins else None,
        **about,
    )
