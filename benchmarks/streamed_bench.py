"""What streaming runs share: the model made and opened, its inputs, its tiers and their speeds; and the check of it."""

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import moe_lab as lab
from benchmarks.streamed_file import (
    ROLES,
    SMALL,
    V41,
    Shape,
    chosen,
    distinct_blocks,
    fill_memory,
    head_of,
    routers,
    write_file,
)  # fmt: skip
from benchmarks.streamed_inputs import inputs, predicted, wide_trace
from moe_lab.errors import LabError
from moe_lab.formats import QuantTensor
from moe_lab.open import Checkpoint
from moe_lab.stream.calibrate import read_trial
from moe_lab.stream.memory import LockedBlock, host_block
from moe_lab.stream.memory_source import MemorySource
from moe_lab.stream.prediction import Successor
from moe_lab.stream.source import ExpertSource
from moe_lab.trace import RoutingTrace
from moe_lab.weights import RouterWeights, SharedWeights

DISTINCT = {"v4.1": 16, "small": 8}
REQUEST_BYTES = 4 << 20


@dataclass(slots=True)
class Bench:
    """What every cell of the table shares."""

    args: argparse.Namespace
    shape: Shape
    ckpt: Checkpoint
    trace: RoutingTrace
    rows: list[torch.Tensor]
    segment: range
    blocks: dict[str, list[np.ndarray]]  # the distinct matrices, quantised
    resident: list[torch.Tensor]  # what layer 0 gives for the segment's first tokens with all experts in memory
    full: list[Any] = field(default_factory=list)  # trials with every expert at hand
    digests: dict[str, str] = field(default_factory=dict)
    memory: MemorySource | None = None
    block: Any = None  # host memory of `tier_speed`; a page-locked one is locked for as long as it is held
    beside: lab.ExpertCache = field(default_factory=lambda: lab.ExpertCache(slots=1, threads=1))

    def source(self, tier: str) -> ExpertSource:
        """Where the experts of a tier come from."""
        if tier == "disk":
            return self.ckpt.expert_source
        if self.memory is None:
            self.memory = self._made(self.ckpt.expert_source, locked=self.args.device == "cuda")
        return self.memory

    def _made(self, source: ExpertSource, *, locked: bool) -> MemorySource:
        """The experts in memory, made there."""
        bench = self

        class Made(MemorySource):
            def _fill(self, source: ExpertSource) -> None:
                fill_memory(bench.shape, bench.blocks, self, self._bytes)

        return Made(source, locked=locked)

    def layers(self, source: ExpertSource, cache: lab.ExpertCache) -> list[lab.MoELayer]:
        """Each layer, its experts from `source`."""
        if source is self.ckpt.expert_source:
            return [self.ckpt.layer(n, device=self.args.device, cache=cache) for n in self.ckpt.moe_layers]
        made = [self._from(source, cache, n) for n in self.ckpt.moe_layers]
        for layer, following in zip(made, [*made[1:], None], strict=True):
            layer.successor = Successor.none() if following is None else Successor.of(following)
        return made

    def _from(self, source: ExpertSource, cache: lab.ExpertCache, number: int) -> lab.MoELayer:
        """The layer as the checkpoint makes it, over another source."""
        own = self.ckpt.layer(number, device=self.args.device, cache=self.beside)
        return lab.MoELayer.streamed(
            own.spec, router=own.router_weights, source=source, layer=number, cache=cache, shared=own.shared,
            device=self.args.device, model_hash=self.ckpt.model_hash,
        )  # fmt: skip

    def picks(self, token: int, layer: int) -> list[int]:
        """What the trace says."""
        return self.trace.ids[token, layer].tolist()


def tier_speed(bench: Bench, tier: str) -> float:
    """GB/s of the tier itself: random direct reads of the file, or one large copy from host memory."""
    args = bench.args
    if tier == "disk":
        total = min(384 << 20, bench.ckpt.size // 2)
        io = "direct" if bench.ckpt.expert_source.open().io_mode == "direct" else "dropped"
        setting = (args.threads, min(REQUEST_BYTES, bench.shape.expert_bytes), io)
        seconds, _ = read_trial(bench.ckpt.path, setting, total, seed=time.perf_counter_ns() % 9973)
        return total / seconds / 1e9
    if bench.block is None:
        bench.block = LockedBlock(256 << 20) if args.device == "cuda" else host_block(256 << 20)
    here = getattr(bench.block, "tensor", bench.block)
    there = torch.ones(256 << 20, dtype=torch.uint8, device=args.device)
    tried = [_seconds(lambda: there.copy_(here, non_blocking=True), args.device) for _ in range(6)][1:]
    return there.numel() / statistics.median(tried) / 1e9


def _seconds(work: Callable[[], Any], device: str) -> float:
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    sync()
    begin = time.perf_counter()
    work()
    sync()
    return time.perf_counter() - begin


def resident_layer(shape: Shape, blocks: dict[str, list[np.ndarray]], spec: lab.MoESpec, device: str) -> lab.MoELayer:
    """Layer 0 out of the blocks alone, without the file: compiles the kernels and is what streamed bits must equal."""
    count, parts = len(blocks["gate"]), {}
    for role in ROLES:
        rows, columns, name = shape.sizes(role)
        held = torch.from_numpy(np.stack(blocks[role])).to(device)
        which = torch.tensor([chosen(shape, count, 0, e)[role] for e in range(shape.experts)], device=device)
        parts[role] = QuantTensor.from_bytes(
            held[which].view(shape.experts, rows, -1), name, (shape.experts, rows, columns)
        )
        parts[f"shared_{role}"] = QuantTensor.from_bytes(held[0].view(rows, -1), name, (rows, columns))
    shared = SharedWeights(*(parts[f"shared_{role}"] for role in ROLES))
    router = RouterWeights(routers(shape)[0].to(device), correction_bias=torch.zeros(shape.experts, device=device))
    return lab.MoELayer.from_tensors(spec, router=router, shared=shared, number=0, **{r: parts[r] for r in ROLES})


def check(bench: Bench, tier: str, say: Callable[[str], None]) -> None:
    """LabError unless routers pick what the trace says and layer 0 has the resident layer's bits through the tier."""
    tokens, source = list(bench.segment)[: len(bench.resident)], bench.source(tier)
    with lab.ExpertCache(slots=2 * bench.shape.top_k * bench.shape.layers, threads=bench.args.threads) as cache:
        layers = bench.layers(source, cache)
        for number, layer in enumerate(layers):
            for place, token in enumerate(tokens):
                y = layer(bench.rows[number][token : token + 1], bench.args.arm)
                if set(y.routing.ids[0].tolist()) != set(bench.picks(token, number)):
                    raise LabError(f"token {token}, layer {number}: the router picks other experts than the trace")
                if number == 0 and not torch.equal(y.out, bench.resident[place]):
                    raise LabError(f"token {token}: layer 0 from the {tier} has other bits than the resident one")
        say(f"checked: {tier}, {len(tokens)} tokens x {len(layers)} layers, {cache.io_mode}, {source!r}")


def shape_of(args: argparse.Namespace) -> Shape:
    """The model's shape; with `--gib` as many experts a layer, in steps of 32, as come nearest to that size."""
    shape = V41 if args.scale == "v4.1" else SMALL
    if args.gib is None:
        return shape
    experts = round(args.gib * 2**30 / (shape.layers * shape.expert_bytes) / 32) * 32
    return replace(shape, experts=max(32, experts))


def prepare(args: argparse.Namespace, path: Path, say: Callable[[str], None]) -> Bench:
    """The model on the disk, its inputs, the kernels compiled meanwhile."""
    shape = shape_of(args)
    blocks = distinct_blocks(shape, DISTINCT[args.scale], args.device)
    say(f"quantised {3 * DISTINCT[args.scale]} matrices")
    written: list[int] = []
    on_disk = "disk" in args.tiers
    writer = threading.Thread(target=lambda: written.append(write_file(path, shape, blocks, on_disk)))
    writer.start()
    trace = wide_trace(
        lab.RoutingTrace.load(Path(__file__).parents[1] / "data/trace.parquet"), shape, args.history + args.steps
    )
    rows = inputs(trace, predicted(trace), shape, args.device)
    segment = range(args.history, args.history + args.steps)
    spec = _spec(shape, path.with_suffix(".head.gguf"))
    layer = resident_layer(shape, blocks, spec, args.device)
    first = list(segment)[:4]
    resident = [layer(rows[0][t : t + 1], args.arm).out for t in first]
    say("resident layer has run")
    del layer
    writer.join()
    if not written:
        raise LabError("the model file could not be written")
    say(f"{'wrote' if on_disk else 'a head for'} {written[0] / 1e9:.2f} GB")
    return Bench(args, shape, lab.open(path), trace, rows, segment, blocks, resident)


def _spec(shape: Shape, path: Path) -> lab.MoESpec:
    """The layer's spec as `lab.open` reads it of such a file: of one with a head and a hole."""
    try:
        head, end = head_of(shape)
        with path.open("wb") as file:
            file.write(head)
            file.truncate(end)
        with lab.open(path) as ckpt:
            return ckpt.layer_spec(0)
    finally:
        path.unlink(missing_ok=True)
