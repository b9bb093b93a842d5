"""What a trace asks a cache for, in the engine's order: step by step, layer by layer, experts ascending."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moe_lab.checks import came, wants_whole
from moe_lab.errors import LabError, LabTypeError
from moe_lab.stream.policies.base import Key
from moe_lab.stream.slots import distinct, split_waves
from moe_lab.trace import NO_PICK, RoutingTrace

Trace = RoutingTrace | np.ndarray


@dataclass(frozen=True, slots=True)
class Request:
    """Distinct experts of one layer, wanted at once for the tokens of one step; ascending."""

    step: int
    layer: int
    keys: list[Key]


def requests_of(trace: Trace, step_tokens: int = 1) -> tuple[tuple[int, ...], list[Request]]:
    """The layers' numbers and every request. `step_tokens` tokens are served together, as a batch is."""
    wants_whole("step_tokens", step_tokens, 1)
    ids, layers, experts = ids_of(trace)
    if ids.size == 0:
        return layers, []
    key_of = {layer: [(layer, expert) for expert in range(experts)] for layer in layers}
    found = []
    for step, start in enumerate(range(0, len(ids), step_tokens)):
        for layer, picks in zip(layers, ids[start : start + step_tokens].swapaxes(0, 1).tolist(), strict=True):
            keys = key_of[layer]
            wanted = [keys[e] for e in distinct(p for row in picks for p in row) if 0 <= e < experts]
            found.append(Request(step, layer, wanted))
    return layers, found


def in_waves(requests: list[Request], shares: Mapping[int, range]) -> list[Request]:
    """As the engine asks: a request for more experts than the layer has slots comes in waves that fit."""
    return [
        Request(request.step, request.layer, list(wave))
        for request in requests
        for wave in split_waves(request.keys, len(shares[request.layer]))
    ]


def ids_of(trace: Trace) -> tuple[np.ndarray, tuple[int, ...], int]:
    """ids [T, L, K], the layers' numbers, and E; ids outside 0..E-1 are nothing to fetch."""
    if isinstance(trace, RoutingTrace):
        # Picks from E on are skipped: zero-computation experts have no weights, and "no pick" is the largest number.
        return trace.ids, tuple(trace.layers), trace.num_experts
    if isinstance(trace, str | os.PathLike):
        raise LabTypeError(f"a trace is {came(trace)}: RoutingTrace.load(..) reads one.")
    try:
        ids = np.asarray(trace)
    except ValueError as error:  # rows of several lengths
        raise LabTypeError(f"a trace is {came(trace)}; wanted a RoutingTrace or whole numbers [T, L, K].") from error
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise LabError(f"a trace is a RoutingTrace or whole numbers [T, L, K], got {ids.dtype} of shape {ids.shape}.")
    if ids.shape[1] == 0:
        raise LabError(f"the trace has shape {ids.shape}: no layers.")
    skipped = ids == NO_PICK if ids.dtype == np.uint16 else ids < 0
    ids = np.where(skipped, -1, ids.astype(np.int64))
    return ids, tuple(range(ids.shape[1])), int(ids.max(initial=-1)) + 1
