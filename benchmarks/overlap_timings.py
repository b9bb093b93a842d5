"""What overlapping fetch and compute gains: steps of a model whose experts do not fit, one switch at a time.

    PYTHONPATH=.:kernels python benchmarks/overlap_timings.py --out DIR [--scale full|small] [--steps 40]
        [--tokens 1] [--modes plain,auto,...] [--budget-s 50]

A synthetic model of 4 layers (q2_k, q2_k, q3_k; a shared expert) is written to a file and held in page-locked memory as
well. `--tokens` a step (prediction takes at most 8) with skewed, slowly moving picks. First every form's outputs are
compared with the resident layers', bit for bit. Then milliseconds a step, median over steps, the host's clock until the
device is idle:
    resident    every expert at hand: the compute bound
    plain       what is missing is waited for before anything is computed
    two-phase   resident experts are always computed while the missing ones land
    auto        the same where the rule of `execution.two_phase` says so; so do the rest
    ahead-k     the next layer's k predicted experts are read in the background
    perfect     the same with the next layer's true picks
    side        ahead-6 with the shared expert on a side stream
"""

import argparse
import csv
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moe_lab.bench.gemv_layer import DOWN, GATE_UP, Weights, make_weights
from moe_lab.bench.runner import measured_on
from moe_lab.bench.workloads import LayerShape
from moe_lab.execution import experts as host_groups
from moe_lab.execution import lookahead
from moe_lab.formats import QuantTensor
from moe_lab.layer import MoELayer, Options, SharedWeights
from moe_lab.spec import MoESpec, RouterSpec, SharedSpec
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.memory_source import MemorySource
from moe_lab.stream.prediction import Successor
from moe_lab.stream.source import ExpertSource

LAYERS, WARM = 4, 8
SHAPES = {
    "full": LayerShape("v4.1-like", 5120, 2304, 32, 6),
    "small": LayerShape("small", 512, 256, 16, 2),
}
MODES: dict[str, Options] = {
    "plain": Options(),
    "two-phase": Options(),
    "auto": Options(),
    "ahead-6": Options(prefetch=6),
    "ahead-12": Options(prefetch=12),
    "perfect": Options(prefetch=6),
    "side": Options(prefetch=6, shared="side"),
}
COLUMNS = ["tier", "slots", "tokens", "mode", "ok", "step_ms_p20", "step_ms", "step_ms_p80", "resident_ms",
           "fetch_wait_ms", "misses", "late_or_ahead", "mb", "read_ahead", "scale", "steps", "device", "driver",
           "torch", "triton", "commit"]  # fmt: skip


@dataclass
class Model:
    """Specs and dense weights of the layers, their experts' file, and the resident twins."""

    spec: MoESpec
    routers: list[torch.Tensor]
    shared: list[SharedWeights]
    source: ExpertSource
    resident: list[MoELayer] = field(default_factory=list)

    def streamed(self, source: ExpertSource, cache: ExpertCache) -> list[MoELayer]:
        """The layers over a cache, each knowing the next."""
        layers = [
            MoELayer.streamed(
                self.spec, router=self.routers[i], source=source, layer=i, cache=cache, shared=self.shared[i],
                device=self.routers[i].device,
            )
            for i in range(LAYERS)
        ]  # fmt: skip
        for layer, after in itertools.pairwise(layers):
            layer.successor = Successor.of(after)
        layers[-1].successor = Successor.none()
        return layers


def make_model(shape: LayerShape, folder: Path, device: str) -> Model:
    """Genuinely quantised rows; routers of Gaussians whose experts differ in size, so that some are picked often."""
    d, f, e = shape.d_model, shape.d_expert, shape.experts
    spec = MoESpec(RouterSpec(e, shape.top_k, normalize=True), d, f, shared=SharedSpec(f))
    sizes = (("gate", GATE_UP, (e, f, d)), ("up", GATE_UP, (e, f, d)), ("down", DOWN, (e, d, f)))
    path, slices, made = folder / "experts.bin", {}, Model(spec, [], [], None)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(5)
    with path.open("wb") as file:
        for i in range(LAYERS):
            w = make_weights(shape, i, device)
            slices[i] = []
            for name, fmt, size in sizes:
                raw = getattr(w, name).cpu().contiguous()
                slices[i].append((f"blk.{i}.{name}", fmt, file.tell(), raw.numel() // e, size))
                file.write(raw.numpy().data)
            scale = torch.exp(torch.randn(e, 1, generator=draw) * 0.3)
            router = torch.randn(e, d, generator=draw) * scale * d**-0.5 * 2
            made.routers.append(router.to(device, torch.bfloat16))
            made.shared.append(_shared(make_weights(LayerShape("shared", d, f, 1, 1), 90 + i, device), d, f))
            gate, up, down = (QuantTensor.from_bytes(getattr(w, n), fmt, size) for n, fmt, size in sizes)
            made.resident.append(
                MoELayer.from_tensors(
                    spec, router=made.routers[i], gate=gate, up=up, down=down, shared=made.shared[i], number=i
                )
            )
    made.source = ExpertSource(path, slices)
    return made


def _shared(w: Weights, d: int, f: int) -> SharedWeights:
    parts = ((w.gate, GATE_UP, (f, d)), (w.up, GATE_UP, (f, d)), (w.down, DOWN, (d, f)))
    gate, up, down = (QuantTensor.from_bytes(t[0], fmt, size) for t, fmt, size in parts)
    return SharedWeights(gate, up, down)


def tokens(spec: MoESpec, count: int, rows: int, device: str) -> list[torch.Tensor]:
    """Steps of `rows` rows that keep most of the step before."""
    draw, x, out = torch.Generator().manual_seed(9), None, []
    for _ in range(count):
        new = torch.randn(rows, spec.d_model, generator=draw)
        x = new if x is None else 0.8 * x + 0.6 * new
        out.append(x.to(device, torch.bfloat16))
    return out


class Known:
    """A guess that is the truth: the next layer's picks of this token, looked up by its step and layer."""

    picks: dict[int, list[list[int]]] = {}  # noqa: RUF012
    step = 0

    def __init__(self, x: torch.Tensor, successor: Successor, width: int) -> None:
        self._number = successor.number

    def read(self) -> list[int]:
        """The experts."""
        return self.picks[self._number][Known.step]


@contextmanager
def switched(mode: str) -> Iterator[None]:
    """One phase for `plain`, two for `two-phase`, known picks for `perfect`."""
    rule, guess = host_groups.worth_two, lookahead.Guess
    if mode in ("plain", "two-phase"):
        host_groups.worth_two = lambda blocked, tokens: mode == "two-phase"
    if mode == "perfect":
        lookahead.Guess = Known  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        host_groups.worth_two, lookahead.Guess = rule, guess


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def walk(layers: list[MoELayer], xs: list[torch.Tensor], options: Options, device: str) -> tuple[list, list, list]:
    """Each token through all layers: milliseconds a step, outputs, and the calls."""
    times, outs, calls = [], [], []
    for Known.step, x in enumerate(xs):
        sync(device)
        begin = time.perf_counter()
        for layer in layers:
            y = layer(x, "gemv", options=options)
            calls.append(y)
            x = (x.float() + 0.3 * y.out.float() / y.out.float().square().mean().sqrt()).bfloat16()
        sync(device)
        times.append((time.perf_counter() - begin) * 1e3)
        outs.append(x)
    return times, outs, calls


def measure(model: Model, tier: str, slots: int, mode: str, xs: list, wanted: list, device: str) -> dict[str, Any]:
    """One form: fresh cache, a few steps to warm it, then the timed ones."""
    source = model.source if tier == "file" else memory_of(model)
    with ExpertCache(slots, policy="lfu_decay", threads=4, io="buffered") as cache, switched(mode):
        layers = model.streamed(source, cache)
        times, outs, calls = walk(layers, xs, MODES[mode], device)
        timed, steps = calls[WARM * LAYERS :], len(xs) - WARM
        waits = [y.timing.fetch_ms for y in timed]
        p20, p50, p80 = (sorted(times[WARM:])[int(q * (steps - 1))] for q in (0.2, 0.5, 0.8))
        return {
            "tier": tier, "slots": slots, "mode": mode,
            "ok": all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True)),
            "step_ms_p20": p20, "step_ms": p50, "step_ms_p80": p80, "fetch_wait_ms": sum(waits) / steps,
            "misses": sum(y.timing.misses for y in timed) / steps,
            "late_or_ahead": sum(y.timing.prefetched for y in timed) / steps,
            "mb": cache.bytes_read / len(xs) / 1e6, "read_ahead": cache.read_ahead / len(xs), "steps": steps,
        }  # fmt: skip


_MEMORY: list[MemorySource] = []


def memory_of(model: Model) -> MemorySource:
    """The experts in page-locked memory, made once."""
    if not _MEMORY:
        _MEMORY.append(MemorySource(model.source, locked=True))
    return _MEMORY[0]


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument("--scale", choices=SHAPES, default="full")
    ask.add_argument("--steps", type=int, default=40)
    ask.add_argument("--tokens", type=int, default=1)
    ask.add_argument("--modes", default="")
    ask.add_argument("--budget-s", type=float, default=50.0)
    given = ask.parse_args()
    begin, device = time.monotonic(), "cuda" if torch.cuda.is_available() else "cpu"
    given.out.mkdir(parents=True, exist_ok=True)
    shape, about = SHAPES[given.scale], measured_on()
    total, modes = LAYERS * shape.experts, given.modes.split(",") if given.modes else list(MODES)
    with tempfile.TemporaryDirectory() as folder, (given.out / "overlap_timings.csv").open("w", newline="") as file:
        model = make_model(shape, Path(folder), device)
        xs = tokens(model.spec, WARM + given.steps, given.tokens, device)
        walk(model.resident, xs[:2], Options(), device)
        times, wanted, calls = walk(model.resident, xs, Options(), device)
        resident = statistics.median(times[WARM:])
        Known.picks = {i: [y.routing.ids.flatten().tolist() for y in calls[i::LAYERS]] for i in range(LAYERS)}
        print(f"made in {time.monotonic() - begin:.1f} s; slot {model.source.slot_bytes / 2**20:.1f} MiB; resident "
              f"{resident:.2f} ms a step", flush=True)  # fmt: skip
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for slots, tier in itertools.product((total // 4, total // 2), ("locked", "file")):
            for mode in modes:
                if time.monotonic() - begin > given.budget_s:
                    print("out of time", flush=True)
                    return
                row = measure(model, tier, slots, mode, xs, wanted, device)
                row |= {"resident_ms": resident, "tokens": given.tokens, "scale": given.scale, **about}
                table.writerow({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
                file.flush()
                print(" ".join(f"{k}={row[k]:.2f}" if isinstance(row[k], float) else f"{k}={row[k]}"
                               for k in COLUMNS[:13]), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
