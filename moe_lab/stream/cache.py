"""The expert cache: a fixed number of slots, filled from a file by background threads, lent out by lease.

    with ExpertCache(slots=8) as cache:
        cache.bind(source, "cpu")
        for wave in cache.waves(experts):
            with cache.lease(source, layer, wave) as lease:
                gate = lease.views("gate")      # uint8 [S, N, row_bytes]; expert i of the wave is gate[lease.slots[i]]

The cache changes when bytes arrive, never which expert runs. What happens between a request and its release stands in
`requests`, the life of one expert in `fills`, the line of what may be read ahead in `ahead`.
"""

import os
import weakref
from collections.abc import Iterable, Sequence
from types import NoneType

import torch

from moe_lab.card import byte_size, card
from moe_lab.checks import wants, wants_number
from moe_lab.errors import LabError
from moe_lab.stream import journal as note
from moe_lab.stream.access import IoMode, check_io
from moe_lab.stream.calibration import reading_for
from moe_lab.stream.events import NONE, EventLog
from moe_lab.stream.lease import Lease
from moe_lab.stream.live_table import LiveTable, follow
from moe_lab.stream.policy import Policy, make_policy, policy_factory, policy_name
from moe_lab.stream.reader import ReaderPool
from moe_lab.stream.requests import WAIT_S, Requests, weakly
from moe_lab.stream.setup import MemoryPlan, make_fitting_arena, make_partitions, open_readers, plan_memory
from moe_lab.stream.sizing import check_size, check_threads, slots_in
from moe_lab.stream.slots import distinct, introduce, numbers, split_slots, split_waves
from moe_lab.stream.source import ExpertSource
from moe_lab.stream.verify import Verifier, Verify, check_verify
from moe_lab.system.devices import resolve_device


class ExpertCache(Requests):
    """`slots` experts, or as many as `gib` GiB hold, kept ready under `policy` (a name or your own object).

    `per_layer`: the slots are split evenly over the layers, each with a policy of its own (a copy of your object, which
    itself stays as it was; `policies` has those at work). `threads` read the file
    (None: as many as `moe-lab calibrate` found best for its disk, else 4). `io`: how, see `stream.access`; `verify`:
    "sampled" or "strict" checksums, which packed files have. `poison` (to find errors): freed slots hold NaN bytes.
    Memory is taken at the first `bind`; slots that it has no room for are halved, with a warning. Counters: hits and
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
        poison: bool = False,
    ) -> None:
        check_size(slots, gib)
        check_threads(threads)
        check_io(io)
        check_verify(verify)
        self._io: IoMode = io
        self._verify: Verify = verify
        self._slots, self._gib, self._per_layer, self._threads = slots, gib, per_layer, threads
        self._poison = poison
        self._policy = policy
        make_policy(policy)  # refuse an unknown name now, not at the first layer
        self._process = os.getpid()
        super().__init__()
        self._verifier: Verifier | None = None
        self._io_mode: str | None = None
        self._plan_of_memory: MemoryPlan | None = None
        self._stop = lambda: None
        self._live: LiveTable | None = None

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
    def bytes_dropped(self) -> int:
        """File bytes read in the background for experts that were given up on their way; `bytes_read` lacks them."""
        return sum(part.bytes_dropped for part in self._partitions)

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

        RuntimeWarning for fewer slots than asked for, where memory lacks: `slots` says how many. Raises LabError for a
        second source or device, and when not even one slot (`per_layer`: one a layer) fits; CheckpointError when the
        file changed since its header was read.
        """
        where = resolve_device(device)
        wants("source", source, ExpertSource, "where the experts come from, as ckpt.expert_source is")
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
            return split_waves(distinct(numbers(experts)), min(len(part.table.slots) for part in self._partitions))

    def slots_for(self, layer: int) -> int:
        """Experts of `layer` that can be held at once: all slots, or the layer's share of them."""
        with self._lock:
            self._require_bound()
            assert self._source is not None
            self._source.check_experts(layer, ())
            return len(self._by_layer[layer].table.slots)

    def lease(
        self,
        source: ExpertSource,
        layer: int,
        experts: Iterable[int],
        *,
        timeout_s: float = WAIT_S,
        wait: bool = True,
    ) -> Lease:
        """Hold `experts` of `layer` in slots, reading those that are absent; returns when all bytes are in place.

        `wait=False` returns when all have their slots and the reads have begun: those in `lease.awaited` may be used
        only after `lease.wait()`. Raises LabError when there are more distinct experts than slots, or when no slot gets
        free within `timeout_s`; CheckpointError, naming layer, expert and file, when a read fails (the next request
        tries it again).
        """
        if os.getpid() != self._process:
            raise LabError(
                "this expert cache belongs to the process that made it (its reader threads do not survive a fork)."
            )
        wants_number("timeout_s", timeout_s)
        lease = Lease(layer, numbers(experts), self._release, self._dropped, self._finish)
        with self._lock:
            self._require_bound()
            self._require_same(source, None)
            try:
                self._end_dropped()
                self._begin(lease, timeout_s)
                if wait or not lease.pending:
                    self._complete(lease)
            except BaseException:
                self._recover(lease)
                raise
        return lease

    def prefetch(self, source: ExpertSource, layer: int, experts: Iterable[int]) -> list[int]:
        """Ask for absent `experts` to be read in the background, likeliest first, behind everything that somebody waits
        for. Never waits.

        Returns those begun at once. The others stand in line: each begins when a reader, within the background's limit,
        a slot that nobody holds and a buffer are there, unless the layer's picks (`settle`), another prefetch for the
        layer, `cancel_prefetches` or a failed request make it stale first. A later `lease` finds them, there or on
        their way, as hits. A read that fails is told to nobody: the next request tries it again.
        """
        with self._lock:
            self._require_bound()
            self._require_same(source, None)
            wanted = list(dict.fromkeys(numbers(experts)))
            source.check_experts(layer, wanted)
            try:
                begun = self._wish(layer, wanted)
            except BaseException:
                self._recover(None)
                raise
            return [expert for _, expert in begun]

    def absent(self, source: ExpertSource, layer: int, experts: Iterable[int]) -> int:
        """As `prefetch`; returns how many were neither there nor on their way."""
        wanted = list(experts)
        with self._lock:
            self._require_bound()
            part = self._by_layer.get(layer)
            count = 0 if part is None else sum((layer, e) not in part.table.resident for e in dict.fromkeys(wanted))
        self.prefetch(source, layer, wanted)
        return count

    def no_prediction(self, layer: int, reason: int) -> None:
        """Note in the log that `layer` made no prediction (see `prediction.REASONS`)."""
        self._journal.request(note.INELIGIBLE, layer, NONE, reason)

    def settle(self, layer: int, experts: Iterable[int]) -> None:
        """The picks of `layer` are known: guesses for it that are not among `experts` are given up, those being read at
        their next piece; what stands in line takes their places."""
        with self._lock:
            self._require_bound()
            if not self._line and not any(part.under_way for part in self._partitions):
                return
            wanted = {(layer, int(expert)) for expert in experts}
            self._line.settle(layer, wanted)
            self._by_layer[layer].cancel(lambda key: key[0] == layer and key not in wanted)
            # What was given up before a reader took it ends without a report, and its place is the next one's now.
            try:
                self._read_ahead()
            except BaseException:
                self._recover(None)
                raise

    def cancel_prefetches(self) -> int:
        """Give up background reads that nobody waits for, those under way at their next piece; returns how many
        experts."""
        with self._lock:
            self._require_bound()
            given_up = len(self._line.waiting()) + sum(part.cancel() for part in self._partitions)
            self._line.clear()
            self._changed.notify_all()
            return given_up

    def record(self, log: EventLog | None) -> None:
        """Note what happens from now on in `log`; None ends it."""
        wants("log", log, (EventLog, NoneType), "an EventLog, or None to end it")
        self._journal.log = log

    @property
    def events(self) -> EventLog | None:
        """The log in use."""
        return self._journal.log

    def live_table(self) -> LiveTable:
        """The slots as the device looks them up; made when first asked for, kept in step from then on."""
        with self._lock:
            self._require_bound()
            if self._live is None:
                assert self._source is not None
                assert self._device is not None
                assert self._slots is not None
                self._live = follow(self._source, self._slots, self._device, self._partitions)
            return self._live

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
        split_slots(slots, source.layers, self._per_layer)  # refuse too few before any memory is taken
        reading = reading_for(source.path)
        threads = reading.threads if self._threads is None else self._threads
        verifier = Verifier(source, self._verify)
        least = len(source.layers) if self._per_layer else 1
        arena, slots = make_fitting_arena(source, slots, least, threads, device)
        shares = split_slots(slots, source.layers, self._per_layer)
        try:
            if self._poison:
                arena.poison()
            readers = open_readers(source, threads, self._io)
        except BaseException:
            arena.drop()
            raise
        pool = ReaderPool(readers)
        self._stop = weakref.finalize(self, pool.close)
        make = policy_factory(self._policy) if self._per_layer else (lambda: make_policy(self._policy))
        about = (source, arena, pool, weakly(self), make, reading.request_bytes, verifier, self._journal)
        by_share = make_partitions(list(shares.values()), *about)
        self._partitions = list(by_share.values())
        introduce(part.table for part in self._partitions)
        self._by_layer = {layer: by_share[share] for layer, share in shares.items()}
        self._pool, self._verifier, self._io_mode = pool, verifier, readers[0].io_mode
        self._plan_of_memory = plan_memory(source, slots, threads, arena.buffers, device, readers[0].io_mode)
        self._source, self._device, self._arena, self._slots = source, device, arena, slots
