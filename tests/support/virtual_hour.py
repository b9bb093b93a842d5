"""A server of MoE layers in virtual time: requests arrive, reads and computing take modelled times, nothing sleeps.

The clock is the scheduled pool's. Time passes in three places alone: a read takes what the pool draws (1 us to 1 ms),
computing takes `COMPUTE_NS`, and between tokens the server is idle until the next one arrives (`idle_ns` adds it up).
Reads run beside computing and idling, as threads would. Each minute of the clock somebody may look.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from moe_lab.errors import CheckpointError
from moe_lab.stream import requests
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.events import EventLog
from moe_lab.stream.source import ExpertSource
from tests.support.scheduled_pool import ScheduledPool

MINUTE_NS = 60 * 10**9
COMPUTE_NS = 400_000  # each of a call's two phases


class VirtualTime:
    """What the cache's waits and deadlines take for the module `time`."""

    def __init__(self, pool: ScheduledPool) -> None:
        self._pool = pool

    def perf_counter_ns(self) -> int:
        return self._pool.now

    def monotonic(self) -> float:
        return self._pool.now / 1e9


class Server:
    """One token at a time through all layers of `source`: settle, lease in two phases, release, guess the next layer.

    Counts what the leases themselves say, in plain sums that do not grow: `calls`; those that `failed`, which took
    `failed_ns`; of the others `hits`, `late` and `wait_ms`. `number`: the last request's.
    """

    def __init__(self, cache: ExpertCache, pool: ScheduledPool, source: ExpertSource, seed: int) -> None:
        self.cache, self.pool, self.source = cache, pool, source
        self.rng = Random(seed)
        numbers = {layer: range(source.num_experts(layer)) for layer in source.layers}
        self.popular = {layer: self.rng.sample(every, len(every)) for layer, every in numbers.items()}
        self.log = EventLog(most=1 << 14, clock=lambda: pool.now)
        cache.record(self.log)
        self.calls = self.failed = self.hits = self.late = self.number = 0
        self.idle_ns = self.failed_ns = 0
        self.wait_ms = 0.0

    def serve(self, minutes: int, tokens_per_s: float, each_minute: Callable[[int], None]) -> None:
        """Tokens at random moments, `tokens_per_s` on average, for so many minutes."""
        minute, arrival = 1, 0
        while minute <= minutes:
            arrival += int(self.rng.expovariate(tokens_per_s) * 1e9)
            self._idle(arrival)
            while self.pool.now >= minute * MINUTE_NS:
                each_minute(minute)
                minute += 1
            self._token()

    def _token(self) -> None:
        guessed: list[int] = []
        for layer, after in zip(self.source.layers, (*self.source.layers[1:], None), strict=True):
            picks = self._picks(layer, guessed)
            self._call(layer, picks)
            if after is not None:
                guessed = self._picks(after, [])
                self.cache.prefetch(self.source, after, guessed)

    def _picks(self, layer: int, guessed: list[int]) -> list[int]:
        """Two skewed draws, and mostly one of the experts that were guessed; subjects change every few minutes."""
        popular, rng = self.popular[layer], self.rng
        shift = 5 * (self.pool.now // (7 * MINUTE_NS))
        drawn = {popular[(int(rng.expovariate(0.35)) + shift) % len(popular)] for _ in range(2)}
        return sorted({*drawn, *guessed[:1]} if rng.random() < 0.7 else drawn)

    def _call(self, layer: int, picks: list[int]) -> None:
        self.calls += 1
        begin = self.pool.now
        self.cache.settle(layer, picks)
        try:
            lease = self.cache.lease(self.source, layer, picks, wait=False)
            number = lease.hold.request
            self._work(COMPUTE_NS)
            lease.wait()
        except CheckpointError:
            self.failed += 1
            self.failed_ns += self.pool.now - begin
            return
        self._work(COMPUTE_NS)
        lease.release()
        assert number > self.number, "request numbers come from one rising count"
        self.number = number
        self.hits += lease.hits
        self.late += lease.late_hits
        self.wait_ms += lease.wait_ms

    def _work(self, ns: int) -> None:
        """Time passes here while readers read; one that began beside the work may end a little after it."""
        end = self.pool.now + ns
        while self.pool.now < end and self.pool.run_one():
            pass
        self.pool.now = max(self.pool.now, end)

    def _idle(self, until_ns: int) -> None:
        before = self.pool.now
        self._work(max(0, until_ns - before))
        self.idle_ns += self.pool.now - before


def in_virtual_time(pool: ScheduledPool, patch: pytest.MonkeyPatch) -> None:
    """The cache's own waits and deadlines go by the pool's clock from now on."""
    made: Any = VirtualTime(pool)
    patch.setattr(requests, "time", made)
