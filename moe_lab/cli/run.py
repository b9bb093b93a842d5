"""`moe-lab run`: a model's MoE layers on recorded or synthetic rows, with the time breakdown.

All rows at once, or with `--step-tokens` step by step through all layers, as decoding goes: then by `lab.replay`.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from moe_lab.activations import Inputs
from moe_lab.errors import LabError
from moe_lab.formats.layouts import RAW
from moe_lab.layer import Options
from moe_lab.open import Checkpoint
from moe_lab.open import open as open_checkpoint
from moe_lab.replay import Recording
from moe_lab.replay import run as replay
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.policy import policy_of
from moe_lab.timing import record


def layer_numbers(ckpt: Checkpoint, layer: str) -> list[int]:
    """ "all" or one number. LabError when the file has no such MoE layer."""
    if not ckpt.moe_layers:
        raise LabError(f"{ckpt.path} holds no MoE layer.")
    if layer == "all":
        return list(ckpt.moe_layers)
    if not (layer.isascii() and layer.isdigit()) or int(layer) not in ckpt.moe_layers:
        raise LabError(f"--layer {layer}: {ckpt.path} has MoE layers {', '.join(map(str, ckpt.moe_layers))} (or all).")
    return [int(layer)]


def run_layers(
    file: Path,
    *,
    layer: str,
    tokens: int,
    arm: str,
    cache_gib: float | None,
    cache_slots: int | None,
    packed: Path | None = None,
    device: str,
    recorded: Path | None,
    layout: str = RAW,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Timing rows, one a layer, and notes. Resident layers are called once before the clock counts; streamed runs
    start cold.
    """
    if tokens < 0:
        raise LabError(f"--tokens {tokens}: wanted 0 or more.")
    if packed is not None and cache_gib is None and cache_slots is None:
        raise LabError("--packed is where a cache reads experts: give --cache-gib or --cache-slots with it.")
    with ExitStack() as stack:
        ckpt = open_checkpoint(file, packed=packed, layout=layout)
        numbers = layer_numbers(ckpt, layer)
        assert ckpt.spec is not None
        rows = Inputs(file, ckpt.spec.d_model, tokens, recorded)
        streamed = cache_gib is not None or cache_slots is not None
        cache = stack.enter_context(ExpertCache(slots=cache_slots, gib=cache_gib)) if streamed else None
        layers = [ckpt.layer(n, device=device, cache=cache) for n in numbers]
        inputs = [rows.layer(n).to(device) for n in numbers]
        if cache is None:
            for moe, x in zip(layers, inputs, strict=True):
                moe(x, arm)
        with record() as rec:
            for moe, x in zip(layers, inputs, strict=True):
                moe(x, arm)
        table = rec.timings
        warning = ": no claim about routing" if rows.synthetic else ""
        notes = [
            rows.about + warning,
            "resident, warmed up by one call" if cache is None else f"streamed, cold: {cache!r}",
        ]
        return table.to_dict("records"), notes


def replay_layers(
    file: Path,
    *,
    layer: str,
    tokens: int,
    step_tokens: int,
    arm: str,
    cache_gib: float | None,
    cache_slots: int | None,
    policy: str,
    prefetch: int,
    packed: Path | None,
    device: str,
    recorded: Path | None,
    layout: str = RAW,
    as_json: bool,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of lab.replay: a row a layer for people (medians of ms, sums of counts), a row a (step, layer) in JSON."""
    streamed = cache_gib is not None or cache_slots is not None
    if packed is not None and not streamed:
        raise LabError("--packed is where a cache reads experts: give --cache-gib or --cache-slots with it.")
    if prefetch and not streamed:
        raise LabError("--prefetch reads experts ahead, and these are resident: give --cache-gib or --cache-slots.")
    with ExitStack() as stack:
        ckpt = stack.enter_context(open_checkpoint(file, packed=packed, layout=layout))
        numbers = layer_numbers(ckpt, layer)
        assert ckpt.spec is not None
        rows = Inputs(file, ckpt.spec.d_model, tokens, recorded)
        size = {"slots": cache_slots, "gib": cache_gib}
        cache = stack.enter_context(ExpertCache(**size, policy=policy_of(policy))) if streamed else None
        options = Options(prefetch=prefetch)
        how: dict[str, Any] = {"arm": arm, "step_tokens": step_tokens, "layers": numbers, "device": device}
        found = replay(ckpt, rows, cache=cache, options=options, **how)
        kept = "resident" if cache is None else f"streamed, cold: {cache!r}"
    table: Any = found.table
    if as_json:
        return table.to_dict("records"), []
    notes = [f"{found.about}; {kept}", "median ms of a call; hits, misses and bytes are sums"]
    by_cause: Any = found.stalls.groupby("cause")["wait_ms"]
    waits = sorted(by_cause.sum().to_dict().items(), key=lambda one: -one[1])
    if told := [f"{cause} {ms:.3g} ms" for cause, ms in waits if ms > 0]:
        notes.append("waited, by cause: " + ", ".join(told))
    if prefetch:
        notes += _unpredicted(found)
    return _by_layer(table), notes


def _unpredicted(found: Recording) -> list[str]:
    """Why nothing was read ahead where that was asked for."""
    why: dict[str, set[int]] = {}
    for call in found.calls:
        if call.timing.no_prefetch is not None:
            why.setdefault(call.timing.no_prefetch, set()).add(call.layer)
    notes = [f"no prediction from layer {', '.join(map(str, sorted(at)))}: {reason}" for reason, at in why.items()]
    guessed = any(call.timing.predicted for call in found.calls)
    if guessed and not any(call.timing.prefetched for call in found.calls):
        notes.append("nothing was read ahead: all that was predicted was in the cache or on its way")
    return notes


def _by_layer(table: Any) -> list[dict[str, Any]]:
    layers: Any = table.groupby("layer")
    times = layers[["route_ms", "plan_ms", "demand_wait_ms", "compute_ms", "other_ms", "wall_ms"]].median()
    counts = layers[["hits", "misses", "late_hits", "prefetch_issued", "prefetch_useful", "bytes_read"]].sum()
    if not counts[["prefetch_issued", "late_hits"]].to_numpy().any():
        counts = counts.drop(columns=["late_hits", "prefetch_issued", "prefetch_useful"])
    return times.join(counts).reset_index().to_dict("records")
