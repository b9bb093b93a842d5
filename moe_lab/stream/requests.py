"""Requests to a bound cache: plan, read, wait, let go, recover. One lock, which no read and no wait holds.

Rules of one request: all its keys are pinned before a victim is chosen, victims come from slots nobody holds, and only
then do reads start. A request may be granted in two phases: what is at hand first, the rest when it has landed.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from moe_lab.checks import wants
from moe_lab.errors import LabError
from moe_lab.stream import journal as note
from moe_lab.stream.ahead import Line
from moe_lab.stream.arena import DeviceArena, HostArena
from moe_lab.stream.entry import Entry, Hold
from moe_lab.stream.events import BEGUN, IN_LINE, NONE, RESIDENT, UNDER_WAY, next_number
from moe_lab.stream.fills import Partition
from moe_lab.stream.interval import short_switches
from moe_lab.stream.journal import Journal
from moe_lab.stream.lease import Lease
from moe_lab.stream.policies.base import Key
from moe_lab.stream.reader import ReaderPool
from moe_lab.stream.slots import distinct
from moe_lab.stream.source import ExpertSource

WAIT_S = 30.0
STALL_MS = 1000.0  # a wait for bytes that is longer is counted as a stall; it is never an error


class Requests:
    """What `ExpertCache` does once it is bound; its options and its binding are there."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # never entered twice: it can tell who holds it, which `_sleep` asks
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._source: ExpertSource | None = None
        self._device: torch.device | None = None
        self._arena: HostArena | DeviceArena | None = None
        self._pool: ReaderPool | None = None
        self._by_layer: dict[int, Partition] = {}
        self._partitions: list[Partition] = []
        self._hits = self._stalls = 0
        self._dropped: deque[Lease] = deque()
        self._journal = Journal()
        self._line = Line()
        self._short: deque[tuple[Lease, Entry]] = deque()  # RESERVED for want of a buffer, in order
        self._wanting: set[Hold] = set()  # requests that wait for a slot: nothing more is read ahead meanwhile

    def _begin(self, lease: Lease, timeout_s: float) -> None:
        """Pin the lease's experts, waiting for slots if need be, and start the reads; what is at hand may be used."""
        assert self._source is not None
        assert self._arena is not None
        assert self._pool is not None
        self._plan(lease, timeout_s)
        part = self._by_layer[lease.layer]
        lease.spread = lease.hold.missing < 2 * len(self._pool.threads)  # of more, every thread has whole ones to read
        for entry in lease.entries:
            part.advance(entry, spread=lease.spread, request=lease.hold.request)
            if entry.jobs is None:
                self._short.append((lease, entry))
        arrived = [entry.ready and self._arena.arrived(entry.slot) for entry in lease.entries]
        lease.pending = [entry for entry, there in zip(lease.entries, arrived, strict=True) if not there]
        lease.bytes_read = lease.misses * self._source.expert_nbytes(lease.layer)
        lease.open(self._arena.tensor, self._source.slot_parts(lease.layer))

    def _plan(self, lease: Lease, timeout_s: float) -> None:
        assert self._source is not None
        self._source.check_experts(lease.layer, lease.experts)
        part = self._by_layer[lease.layer]
        keys = [(lease.layer, expert) for expert in distinct(lease.experts)]
        if len(keys) > len(part.table.slots):
            raise LabError(
                f"layer {lease.layer} asks for {len(keys)} experts at once, but the cache has {len(part.table.slots)} "
                "slots for it. Ask in waves (cache.waves(experts)) or give it more slots."
            )
        lease.hold.request = next_number()
        self._journal.request(note.ASKED, lease.layer, lease.hold.request, len(keys))
        deadline = time.monotonic() + timeout_s
        while (planned := part.plan(lease.hold, keys)) is None:
            self._wanting.add(lease.hold)
            self._require_hope(part, lease, len(keys), deadline, timeout_s)
            self._wait(lease, note.SLOT_WAIT, deadline - time.monotonic())
        self._wanting.discard(lease.hold)
        lease.entries, lease.misses = planned
        lease.hits = len(keys) - lease.misses
        lease.late_hits = lease.hold.missing - lease.misses

    def _complete(self, lease: Lease) -> None:
        """Wait until every expert is in place; work on the current stream waits for what is still being copied."""
        assert self._arena is not None
        part, pending = self._by_layer[lease.layer], lease.pending
        how = {"spread": lease.spread, "request": lease.hold.request}
        while pending := [entry for entry in pending if not part.advance(entry, **how)]:
            self._wait(lease, note.BYTES_WAIT, None)
        self._arena.enter([entry.slot for entry in lease.pending])
        lease.pending = []
        self._hits += lease.hits
        self._stalls += lease.wait_ms > STALL_MS
        self._journal.request(note.GRANTED, lease.layer, lease.hold.request)

    def _finish(self, lease: Lease) -> None:
        """The second phase: the rest of a lease that was given out with what was at hand."""
        with self._lock:
            assert self._arena is not None
            try:
                self._require_bound()
                self._complete(lease)
            except BaseException:
                # Work on what was at hand may be queued: its slots must not be filled before it has run.
                self._arena.leave([entry.slot for entry in lease.entries if entry not in lease.pending])
                self._recover(lease)
                raise

    def _wait(self, lease: Lease, what: int, timeout_s: float | None) -> None:
        begin = time.perf_counter_ns()
        since = self._journal.log.clock() if self._journal.log is not None else 0
        with short_switches():  # who is woken needs the interpreter's lock as well, however busy others are
            self._sleep(timeout_s)
        self._journal.request(what, lease.layer, lease.hold.request, since)
        lease.wait_ms += (time.perf_counter_ns() - begin) / 1e6
        self._require_open()
        self._end_dropped()

    def _sleep(self, timeout_s: float | None) -> None:
        """Wait until something has changed. An interrupt may strike between a condition's letting the lock go and its
        taking it again; whoever handles it here must hold it."""
        try:
            self._changed.wait(timeout_s)
        except BaseException:
            if not self._lock._is_owned():  # type: ignore[attr-defined]
                self._lock.acquire()
            raise

    def _report(self, entry: Entry, error: Exception | None) -> None:
        """A reader thread ended one job."""
        with self._lock:
            try:
                settled = self._by_layer[entry.key[0]].finish(entry, error)
                if not self._closed:
                    self._refill()
            except BaseException:
                self._changed.notify_all()
                raise
            if settled:
                self._changed.notify_all()

    def _refill(self) -> None:
        """A buffer or a reader may have become free: for those who wait first, then for what may be read ahead."""
        while self._short:
            lease, entry = self._short[0]
            if lease.hold in entry.holds and entry.jobs is None and entry.cause is None:
                try:
                    self._by_layer[lease.layer].advance(entry, spread=lease.spread, request=lease.hold.request)
                except Exception:  # its holder meets it too, where somebody can be told
                    self._changed.notify_all()
                if entry.jobs is None and entry.cause is None:
                    return
            self._short.popleft()
        if self._line:
            self._read_ahead()

    def _read_ahead(self) -> list[Key]:
        """Begin background reads in the line's order as far as limit, slots and buffers allow; returns those begun."""
        assert self._pool is not None
        begun: list[Key] = []
        if self._wanting or self._short:
            return begun
        for turn in self._line.turns():
            part = self._by_layer[turn.layer]
            others = sum(len(other.under_way) for other in self._partitions if other is not part)
            absent = [key for key in turn.todo if key not in part.table.resident]
            started = part.prefetch(absent, self._pool.background - others, turn.keys)
            for key in started:
                self._journal.guess(*key, part.entries[part.table.resident[key]].read, BEGUN)
            turn.todo = absent[len(started) :]
            begun += started
        return begun

    def _wish(self, layer: int, experts: Sequence[int]) -> list[Key]:
        """Put absent `experts` of `layer`, likeliest first, in line; returns those whose reads could begin at once."""
        part = self._by_layer[layer]
        keys = [(layer, expert) for expert in experts]
        absent = [key for key in keys if key not in part.table.resident]
        if self._journal.log is not None:
            for key in keys:
                if (slot := part.table.resident.get(key)) is None:
                    self._journal.guess(*key, NONE, IN_LINE)
                else:
                    entry = part.entries[slot]
                    self._journal.guess(*key, entry.read, RESIDENT if entry.ready else UNDER_WAY)
        self._line.ask(layer, keys, absent)
        return self._read_ahead()

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
        self._journal.request(note.ENDED, lease.layer, lease.hold.request)
        if self._line and not self._closed:
            self._read_ahead()
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
            self._wanting.discard(lease.hold)
        self._line.clear()  # guesses of a step that did not happen
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
                f"cache full: {part.held} in use of slots={slots}, {why}; layer {lease.layer} asks for {wanted} "
                f"(request {lease.hold.request}). "
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
        wants("source", source, ExpertSource, "where the experts come from, as ckpt.expert_source is")
        if source.layout != self._source.layout:
            raise LabError(
                f"this expert cache keeps experts in layout {self._source.layout!r}, not in {source.layout!r}. Make a "
                "second cache."
            )
        if not self._source.same_as(source):
            raise LabError(
                f"this expert cache serves {self._source.path}; it cannot serve {source.path} as well "
                "(or the file changed in between). Make a second cache."
            )
        if device is not None and device != self._device:
            raise LabError(f"this expert cache is on {self._device}, not on {device}. Make a second cache.")


def weakly(cache: Requests) -> Callable[[Entry, Exception | None], None]:
    """The cache's `_report` without keeping the cache: one that nobody refers to ends at once, not at a collection."""
    alive = weakref.ref(cache)

    def report(entry: Entry, error: Exception | None) -> None:
        if (told := alive()) is not None:
            told._report(entry, error)

    return report
