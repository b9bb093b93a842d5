"""The expert cache: a fixed number of slots, filled from a file by background threads, lent out by lease.

    with ExpertCache(slots=8) as cache:
        cache.bind(source, "cpu")
        for wave in cache.waves(experts):
            with cache.lease(source, layer, wave) as lease:
                gate = lease.views("gate")      # uint8 [S, N, row_bytes]; expert i of the wave is gate[lease.slots[i]]

The cache changes when bytes arrive, never which expert runs. All bookkeeping happens under one lock that no read and no
wait holds. Rules of one request: all its keys are pinned before a victim is chosen, victims come from slots nobody
holds, and only then do reads start.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from moe_lab.card import byte_size, card
from moe_lab.devices import resolve_device
from moe_lab.errors import LabError
from moe_lab.stream.access import IoMode, check_io
from moe_lab.stream.arena import DeviceArena, HostArena
from moe_lab.stream.calibration import reading_for
from moe_lab.stream.fills import Entry, Partition
from moe_lab.stream.lease import Lease
from moe_lab.stream.policy import Policy, make_policy, policy_factory, policy_name
from moe_lab.stream.reader import ReaderPool
from moe_lab.stream.setup import MemoryPlan, make_arena, make_partitions, open_readers, plan_memory
from moe_lab.stream.sizing import check_size, check_threads, slots_in
from moe_lab.stream.slots import distinct, split_slots, split_waves
from moe_lab.stream.source import ExpertSource
from moe_lab.stream.verify import Verifier, Verify, check_verify

WAIT_S = 30.0
STALL_MS = 1000.0  # a wait for bytes that is longer is counted as a stall; it is never an error


class ExpertCache:
    """`slots` experts, or as many as `gib` GiB hold, kept ready under `policy` (a name or your own object).

    `per_layer`: the slots are split evenly over the layers, each with a policy of its own (a copy of your object, which
    itself stays as it was; `policies` has those at work). `threads` read the file
    (None: as many as `moe-lab calibrate` found best for its disk, else 4). `io`: how, see `stream.access`; `verify`:
    "sampled" or "strict" checksums, which packed files have. Memory is taken at the first `bind`. Counters: hits and
    misses (experts read), each counted once a request; bytes_read. Safe to use from several threads. Raises LabError
    for options that cannot work.
    """

    def __init__(
        self,
        slots: int | None = None,
        gib: float | None = None,
        policy: str | Policy | object = "lru",
        per_layer: bool = False,
        threads: int | None = None,
        *,
        io: IoMode = "auto",
        verify: Verify = "off",
    ) -> None:
        check_size(slots, gib)
        check_threads(threads)
        check_io(io)
        check_verify(verify)
        self._io: IoMode = io
        self._verify: Verify = verify
        self._slots, self._gib, self._per_layer, self._threads = slots, gib, per_layer, threads
        self._policy = policy
        make_policy(policy)  # refuse an unknown name now, not at the first layer
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._source: ExpertSource | None = None
        self._device: torch.device | None = None
        self._arena: HostArena | DeviceArena | None = None
        self._by_layer: dict[int, Partition] = {}
        self._partitions: list[Partition] = []
        self._pool: ReaderPool | None = None
        self._verifier: Verifier | None = None
        self._io_mode: str | None = None
        self._plan_of_memory: MemoryPlan | None = None
        self._stop = lambda: None
        self._hits = self._stalls = 0
        self._dropped: deque[Lease] = deque()

    def __enter__(self) -> "ExpertCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        size = f"slots={self.slots}" if self.slots is not None else f"gib={self._gib}"
        how = "" if self._io_mode is None else f", io={self._io_mode}"
        return f"ExpertCache({size}, policy={self.policy!r}, hits={self.hits}, misses={self.misses}{how})"

    def _repr_html_(self) -> str:
        facts = {n: getattr(self, n) for n in ("slots", "policy", "hits", "misses", "read_ahead", "stalls", "io_mode")}
        return card("ExpertCache", {**facts, "read": byte_size(self.bytes_read)})

    @property
    def policy(self) -> str:
        """The policy's name, as tables show it."""
        return policy_name(self._policy)

    @property
    def policies(self) -> dict[int, Policy]:
        """The policy at work by layer: the same object, or with `per_layer` one each. Empty before the first `bind`."""
        return {layer: part.table.policy for layer, part in self._by_layer.items()}

    @property
    def slots(self) -> int | None:
        """Experts that fit, over all layers. None while `gib` waits for the first `bind` to learn an expert's size."""
        return self._slots

    @property
    def hits(self) -> int:
        """Distinct experts a request found in the cache (or on their way), summed over requests that succeeded."""
        return self._hits

    @property
    def misses(self) -> int:
        """Experts read."""
        return sum(part.misses for part in self._partitions)

    @property
    def bytes_read(self) -> int:
        """File bytes of the experts read."""
        return sum(part.bytes_read for part in self._partitions)

    @property
    def read_ahead(self) -> int:
        """Experts read in the background, which `misses` does not count."""
        return sum(part.read_ahead for part in self._partitions)

    @property
    def stalls(self) -> int:
        """Requests that waited longer than STALL_MS."""
        return self._stalls

    @property
    def io_mode(self) -> str | None:
        """How the files are read (see `stream.access`); None before the first `bind`."""
        return self._io_mode

    @property
    def memory(self) -> MemoryPlan | None:
        """What the cache takes, exactly; None before the first `bind`."""
        return self._plan_of_memory

    @property
    def verifier(self) -> Verifier | None:
        """Checksums: how many were checked and what it cost; None before the first `bind`."""
        return self._verifier

    def bind(self, source: ExpertSource, device: str | torch.device) -> None:
        """Take the memory on `device` and start the readers; again with the same source and device does nothing.

        Raises LabError for a second source or device, and when the memory cannot be had; CheckpointError when the file
        changed since its header was read.
        """
        where = resolve_device(device)
        with self._lock:
            self._require_open()
            if self._source is None:
                self._build(source, where)
            else:
                self._require_same(source, where)

    def waves(self, experts: Iterable[int]) -> list[Sequence[int]]:
        """Distinct experts, ascending, in groups that fit the cache at once; each expert is in exactly one."""
        with self._lock:
            self._require_bound()
            return split_waves(distinct(experts), min(len(part.table.slots) for part in self._partitions))

    def slots_for(self, layer: int) -> int:
        """Experts of `layer` that can be held at once: all slots, or the layer's share of them."""
        with self._lock:
            self._require_bound()
            assert self._source is not None
            self._source.check_experts(layer, ())
            return len(self._by_layer[layer].table.slots)

    def lease(self, source: ExpertSource, layer: int, experts: Iterable[int], *, timeout_s: float = WAIT_S) -> Lease:
        """Hold `experts` of `layer` in slots, reading those that are absent; returns when all bytes are in place.

        Raises LabError when there are more distinct experts than slots, or when no slot gets free within `timeout_s`;
        CheckpointError, naming layer, expert and file, when a read fails (the next request tries it again).
        """
        if os.getpid() != self._process:
            raise LabError(
                "this expert cache belongs to the process that made it (its reader threads do not survive a fork)."
            )
        lease = Lease(layer, [int(e) for e in experts], self._release, self._dropped)
        with self._lock:
            self._require_bound()
            self._require_same(source, None)
            try:
                self._end_dropped()
                self._plan(lease, timeout_s)
                self._complete(lease)
            except BaseException:
                self._recover(lease)
                raise
        return lease

    def prefetch(self, source: ExpertSource, layer: int, experts: Iterable[int]) -> list[int]:
        """Begin to read absent `experts`, likeliest first, behind everything that somebody waits for. Never waits.

        Returns those begun: what finds no slot, or exceeds the background's limit, is not. A later `lease` finds them,
        there or on their way, as hits. A read that fails is told to nobody: the next request tries it again.
        """
        with self._lock:
            self._require_bound()
            self._require_same(source, None)
            wanted = list(dict.fromkeys(int(e) for e in experts))
            source.check_experts(layer, wanted)
            assert self._pool is not None
            part = self._by_layer[layer]
            try:
                begun = part.prefetch([(layer, expert) for expert in wanted], self._pool.background)
            except BaseException:
                self._recover(None)
                raise
            return [expert for _, expert in begun]

    def cancel_prefetches(self) -> int:
        """Give up background reads that have not begun and that nobody waits for; returns how many experts."""
        with self._lock:
            self._require_bound()
            given_up = sum(part.cancel() for part in self._partitions)
            self._changed.notify_all()
            return given_up

    def close(self) -> None:
        """End the reader threads and give the memory back (open leases keep theirs). A second call does nothing."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self._stop()
        with self._lock:
            if self._arena is not None:
                self._arena.drop()

    def _build(self, source: ExpertSource, device: torch.device) -> None:
        slots = self._slots if self._gib is None else slots_in(self._gib, source)
        assert slots is not None
        shares = split_slots(slots, source.layers, self._per_layer)
        reading = reading_for(source.path)
        threads = reading.threads if self._threads is None else self._threads
        verifier = Verifier(source, self._verify)
        arena = make_arena(source, slots, threads, device)
        try:
            readers = open_readers(source, threads, self._io)
        except BaseException:
            arena.drop()
            raise
        pool = ReaderPool(readers)
        self._stop = weakref.finalize(self, pool.close)
        make = policy_factory(self._policy) if self._per_layer else (lambda: make_policy(self._policy))
        about = (source, arena, pool, _weakly(self), make, reading.request_bytes, verifier)
        by_share = make_partitions(list(shares.values()), *about)
        self._partitions = list(by_share.values())
        self._by_layer = {layer: by_share[share] for layer, share in shares.items()}
        self._pool, self._verifier, self._io_mode = pool, verifier, readers[0].io_mode
        self._plan_of_memory = plan_memory(source, slots, threads, device, readers[0].io_mode)
        self._source, self._device, self._arena, self._slots = source, device, arena, slots

    def _plan(self, lease: Lease, timeout_s: float) -> None:
        """Pin the lease's experts, waiting for slots if need be."""
        assert self._source is not None
        self._source.check_experts(lease.layer, lease.experts)
        part = self._by_layer[lease.layer]
        keys = [(lease.layer, expert) for expert in distinct(lease.experts)]
        if len(keys) > len(part.table.slots):
            raise LabError(
                f"layer {lease.layer} asks for {len(keys)} experts at once, but the cache has {len(part.table.slots)} "
                "slots for it. Ask in waves (cache.waves(experts)) or give it more slots."
            )
        deadline = time.monotonic() + timeout_s
        while (planned := part.plan(lease.hold, keys)) is None:
            self._require_hope(part, lease, len(keys), deadline, timeout_s)
            self._wait(lease, deadline - time.monotonic())
        lease.entries, lease.misses = planned
        lease.hits = len(keys) - lease.misses
        lease.late_hits = lease.hold.missing - lease.misses

    def _complete(self, lease: Lease) -> None:
        """Start the reads and wait until every expert is in place."""
        assert self._source is not None
        assert self._arena is not None
        part = self._by_layer[lease.layer]
        pending = lease.entries
        assert self._pool is not None
        spread = lease.hold.missing < 2 * len(self._pool.threads)  # of more, every thread has whole ones to read
        while pending := [entry for entry in pending if not part.advance(entry, spread=spread)]:
            self._wait(lease, None)
        self._arena.enter([entry.slot for entry in lease.entries])
        lease.bytes_read = lease.misses * self._source.expert_nbytes(lease.layer)
        lease.open(self._arena.tensor, self._source.parts(lease.layer))
        self._hits += lease.hits
        self._stalls += lease.wait_ms > STALL_MS

    def _wait(self, lease: Lease, timeout_s: float | None) -> None:
        begin = time.perf_counter_ns()
        self._changed.wait(timeout_s)
        lease.wait_ms += (time.perf_counter_ns() - begin) / 1e6
        self._require_open()
        self._end_dropped()

    def _report(self, entry: Entry, error: Exception | None) -> None:
        """A reader thread ended one job."""
        with self._lock:
            try:
                settled = self._by_layer[entry.key[0]].finish(entry, error)
            except BaseException:
                self._changed.notify_all()
                raise
            if settled:
                self._changed.notify_all()

    def _release(self, lease: Lease) -> None:
        with self._lock:
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        assert self._arena is not None
        try:
            self._arena.leave([entry.slot for entry in lease.entries])
            self._by_layer[lease.layer].release(lease.hold, lease.entries)
            lease.shut()
        except BaseException:
            self._recover(lease)
            raise
        self._changed.notify_all()

    def _end_dropped(self) -> None:
        """End leases that were collected without being released."""
        while self._dropped:
            self._end(self._dropped[0])  # taken off afterwards: an interrupt in between must not lose it
            self._dropped.popleft()

    def _recover(self, lease: Lease | None) -> None:
        """After an error or interrupt, wherever it struck: the lease holds nothing, no slot or buffer is lost."""
        if lease is not None:
            lease.shut()
        for part in self._partitions:
            part.recover(lease.hold if lease is not None else None, resubmit=not self._closed)
        if self._arena is not None:
            entries = [entry for part in self._partitions for entry in part.entries.values()]
            self._arena.reclaim([entry.stage for entry in entries if entry.stage is not None])
        self._changed.notify_all()

    def _require_hope(self, part: Partition, lease: Lease, wanted: int, deadline: float, timeout_s: float) -> None:
        """LabError when waiting for a slot is over, or cannot help because the caller itself holds the rest."""
        slots = len(part.table.slots)
        keys = {(lease.layer, expert) for expert in lease.experts}
        own = {e.key for e in part.entries.values() if any(h.thread == lease.hold.thread for h in e.holds)}
        alone = len(own | keys) > slots
        if alone or time.monotonic() >= deadline:
            why = "and this thread holds them itself" if alone else f"and none got free in {timeout_s:g} s"
            raise LabError(
                f"cache full: {part.held} in use of slots={slots}, {why}; layer {lease.layer} asks for {wanted}. "
                "End a lease first or give the cache more slots."
            )

    def _require_open(self) -> None:
        if self._closed:
            raise LabError("the expert cache is closed. Make a new one.")

    def _require_bound(self) -> None:
        self._require_open()
        if self._source is None:
            raise LabError("the expert cache has no source yet: call cache.bind(source, device) first.")

    def _require_same(self, source: ExpertSource, device: torch.device | None) -> None:
        assert self._source is not None
        if not self._source.same_as(source):
            raise LabError(
                f"this expert cache serves {self._source.path}; it cannot serve {source.path} as well "
                "(or the file changed in between). Make a second cache."
            )
        if device is not None and device != self._device:
            raise LabError(f"this expert cache is on {self._device}, not on {device}. Make a second cache.")


def _weakly(cache: ExpertCache) -> Callable[[Entry, Exception | None], None]:
    """The cache's `_report` without keeping the cache: one that nobody refers to ends at once, not at a collection."""
    alive = weakref.ref(cache)

    def report(entry: Entry, error: Exception | None) -> None:
        if (told := alive()) is not None:
            told._report(entry, error)

    return report
