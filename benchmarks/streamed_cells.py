"""One cell of a streaming run: a cache at some residency, put back into the same state before each trial, and a trial.

A trial's times are the host's clock until the device is idle. What the host did meanwhile is told apart by the calls'
own stamps (`host`); `wait_ms` is the device's own count of the time that it stood still for bytes.

A decode step is mostly the host's work, and a rented host has slow spells (an H200's: 6.2 and 10.6 ms for the same
step, all experts at hand). So the same bit of Python is timed before and after every step, outside its clock (`pace`):
steps between two quick ones are `quiet`, and can be told from those that met a spell.
"""

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import torch

import moe_lab as lab
from benchmarks.streamed_bench import Bench, tier_speed
from moe_lab.simulate import steps as simulated
from moe_lab.stream.source import ExpertSource

LOOK_AHEAD = 3  # layers whose picks are asked for ahead in perfect prediction
HOST = ("route", "fetch", "compute", "ahead")  # where the host was: phases of the calls, asking ahead between them


@dataclass
class Trial:
    """What one pass over the segment gave: ms of each step, us of the same Python before each step and after the last,
    host ms a step by `HOST`, the device's wait a step, the cache's counts a step, GB a step (those `dropped` among
    them), GB/s of the tier just before and after."""

    times: list[float]
    pace: list[float]
    host: dict[str, float]
    wait_ms: float
    digest: str
    misses: float = 0.0
    ahead: float = 0.0
    gb: float = 0.0
    dropped_gb: float = 0.0
    speed: float = float("nan")

    def quiet(self, pace_us: float) -> list[float]:
        """Steps between two bits of Python that took at most `pace_us`."""
        around = zip(self.times, self.pace, self.pace[1:], strict=False)
        return [ms for ms, before, after in around if max(before, after) <= pace_us]


@dataclass
class Held:
    """A cache that stays open for all trials at one residency."""

    residency: float
    slots: int
    source: ExpertSource
    cache: lab.ExpertCache
    layers: list[lab.MoELayer]
    groups: list[tuple[int, list[int]]]
    belady_misses: float
    trials: dict[str, list[Trial]] = field(default_factory=dict)

    def close(self) -> None:
        """Give the memory back."""
        self.layers.clear()
        self.cache.close()


def held(bench: Bench, tier: str, residency: float) -> Held:
    """The layers over a cache of that share of the experts."""
    args, shape = bench.args, bench.shape
    slots = max(shape.top_k, round(residency * shape.layers * shape.experts))
    before, groups = recent(bench, slots)
    if residency >= 1:
        groups = [(n, bench.picks(t, n)) for t in bench.segment for n in range(shape.layers)]
    source = bench.source(tier)
    cache = lab.ExpertCache(slots=slots, policy=args.policy, threads=args.threads)
    layers = bench.layers(source, cache)
    belady = belady_misses(bench, before, slots) if residency < 1 else 0.0
    return Held(residency, slots, source, cache, layers, groups, belady)


def trial(bench: Bench, tier: str, one: Held, mode: str) -> Trial:
    """One pass over the segment."""
    cache = one.cache
    if mode not in one.trials:
        steps(bench, bench.segment[:2], one, mode)  # kernels and whatever else is made once
    settled(cache)
    for layer, experts in one.groups:  # as LRU has it before the segment: each once, in the order of their last uses
        cache.lease(one.source, layer, experts).release()
    speeds = [tier_speed(bench, tier)]
    before = (cache.misses, cache.read_ahead, cache.bytes_read, cache.bytes_dropped)
    found = steps(bench, bench.segment, one, mode)
    settled(cache)
    after = (cache.misses, cache.read_ahead, cache.bytes_read, cache.bytes_dropped)
    count = len(found.times)
    found.misses, found.ahead, read, dropped = ((b - a) / count for a, b in zip(before, after, strict=True))
    found.dropped_gb = dropped / 1e9
    found.gb = read / 1e9 + found.dropped_gb
    found.speed = float(np.mean([*speeds, tier_speed(bench, tier)]))  # just before and just after: disks drift
    one.trials.setdefault(mode, []).append(found)
    return found


def steps(bench: Bench, tokens: range, one: Held, mode: str) -> Trial:
    """All layers for each token, one after another."""
    options = lab.Options(prefetch=bench.args.width) if mode == "predicted" else lab.Options()
    times, outs, calls, ahead_ns = [], [], [], 0
    gc.collect()
    gc.freeze()  # else a collection of all that was ever imported, 0.13 s, falls into some step or other
    sync = torch.cuda.synchronize if bench.args.device == "cuda" else lambda: None
    ask = _asking(bench, tokens, one) if mode == "perfect" else None
    sync()
    pace = [_pace_us()]
    for token in tokens:
        begin = time.perf_counter_ns()
        for number, layer in enumerate(one.layers):
            if ask is not None:
                ahead_ns += next(ask)
            y = layer(bench.rows[number][token : token + 1], bench.args.arm, options=options)
            outs.append(y.out)
            calls.append(y.timing)
        sync()
        times.append((time.perf_counter_ns() - begin) / 1e6)
        pace.append(_pace_us())
    gc.unfreeze()
    digest = sha256(torch.cat(outs).view(torch.int16).cpu().numpy().tobytes()).hexdigest()[:16]
    waited = sum(call.fetch_ms for call in calls) / len(times)
    return Trial(times, pace, _host(calls, ahead_ns, len(times)), waited, digest)


def _pace_us() -> float:
    """The best of three times of the same bit of Python."""
    found = []
    for _ in range(3):
        begin, n = time.perf_counter_ns(), 0
        for i in range(1000):
            n += i
        found.append((time.perf_counter_ns() - begin) / 1e3)
    return min(found)


def quick_pace(trials: list[Trial]) -> float:
    """What counts as quick: a sixth more than the quickest tenth of all paces."""
    return statistics.quantiles([us for one in trials for us in one.pace], n=10)[0] * 7 / 6


def _asking(bench: Bench, tokens: range, one: Held) -> Iterator[int]:
    """Before each call: the picks of the layers that follow are asked for; gives the nanoseconds that took."""
    places = [(t, n) for t in tokens for n in range(len(one.layers))]
    asked = 0
    for at in range(len(places)):
        begin = time.perf_counter_ns()
        while asked < min(len(places), at + 1 + LOOK_AHEAD):
            if asked > at:
                token, number = places[asked]
                one.cache.prefetch(one.source, number, bench.picks(token, number))
            asked += 1
        yield time.perf_counter_ns() - begin


def _host(calls: list[Any], ahead_ns: int, count: int) -> dict[str, float]:
    """Milliseconds a step in which the host was in each of `HOST`."""
    found: dict[str, float] = {name: 0.0 for name in HOST}
    for call in calls:
        for stamp in call.clock.stamps:
            found[stamp.name] += (stamp.end_ns - stamp.begin_ns) / 1e6 / count
    found["ahead"] = ahead_ns / 1e6 / count
    return found


def recent(bench: Bench, slots: int) -> tuple[range, list[tuple[int, list[int]]]]:
    """(Tokens before the segment that name `slots` experts, as far as there are any; those experts by layer and token,
    the longest unused first).
    """
    last: dict[tuple[int, int], int] = {}
    token = bench.segment.start
    while len(last) < slots and token > 0:
        token -= 1
        for layer in range(bench.shape.layers):
            for expert in bench.picks(token, layer):
                last.setdefault((layer, expert), token)
    groups: dict[tuple[int, int], list[int]] = {}
    for (layer, expert), at in last.items():
        groups.setdefault((at, layer), []).append(expert)
    return range(token, bench.segment.start), [(layer, groups[at, layer]) for at, layer in sorted(groups)]


def settled(cache: lab.ExpertCache) -> None:
    """Nothing is read for nobody any more: what was read ahead is counted or taken back."""
    cache.cancel_prefetches()
    count = -1
    while count != cache.read_ahead:
        count = cache.read_ahead
        time.sleep(0.05)


def belady_misses(bench: Bench, before: range, slots: int) -> float:
    """Misses a step over the segment under the best eviction, the tokens `before` served the same way."""
    part = slice(before.start, bench.segment.stop)
    told = simulated(bench.trace.ids[part], slots, "belady")
    return float(told[told.step >= len(before)].misses.sum()) / len(bench.segment)
