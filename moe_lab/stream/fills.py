"""The life of an expert in the cache: reserved, filling, (staged,) ready, gone. State without waiting.

    RESERVED --submit--> FILLING --last job--> READY            (host arena)
                                 --last job--> STAGED --copy--> READY   (device arena)
             --from page-locked memory-------> STAGED --copy--> READY   (device arena)

A slot is evicted only when it is READY and no lease holds it. Every method runs under the cache's lock and never
blocks; waiting is the cache's job, so tests can drive these steps in any order without threads.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from moe_lab.errors import CheckpointError, LabError
from moe_lab.stream.arena import DeviceArena, HostArena, Stage
from moe_lab.stream.jobs import REQUEST_BYTES, Job, Piece, cut, split_jobs
from moe_lab.stream.policy import Key
from moe_lab.stream.slots import SlotTable
from moe_lab.stream.source import ExpertSource
from moe_lab.stream.verify import LastRead, Verifier

Submit = Callable[[Sequence[Job]], None]
Promote = Callable[[Sequence[Job]], None]
Withdraw = Callable[[Sequence[Job]], bool]
Report = Callable[["Entry", Exception | None], None]


@dataclass(slots=True, eq=False)
class Hold:
    """Who asked for a group of entries: the thread, and how many are not ready yet (it is not woken for less)."""

    thread: int
    missing: int = 0


@dataclass(slots=True, eq=False)
class Entry:
    """One key's stay in one slot. Each transition is a single assignment, so an interrupt leaves no half-made state."""

    key: Key
    slot: int
    holds: set[Hold] = field(default_factory=set)
    stage: Stage | None = None
    left: int = 0  # jobs not yet reported
    jobs: list[Job] | None = None  # None: RESERVED
    ready: bool = False
    ahead: bool = False  # first asked for by a prefetch
    cause: Exception | None = None  # why the fill failed

    @property
    def staged(self) -> bool:
        """Read, but not yet copied to the device."""
        return self.jobs is not None and self.left == 0 and not self.ready


class Partition:
    """The slots of one layer, or of all layers, with their entries.

    `report` is called from reader threads with every finished job's entry; it must end in `finish` under the lock.
    `promote` and `withdraw` are the pool's. Totals of finished fills: `misses` (experts that a request found absent),
    `read_ahead` (experts read in the background), `bytes_read` of both.
    """

    def __init__(
        self,
        table: SlotTable,
        source: ExpertSource,
        arena: HostArena | DeviceArena,
        submit: Submit,
        report: Report,
        *,
        promote: Promote = lambda jobs: None,
        withdraw: Withdraw = lambda jobs: False,
        request_bytes: int = REQUEST_BYTES,
        verifier: Verifier | None = None,
    ) -> None:
        self.table, self._source, self._arena = table, source, arena
        self._submit, self._report = submit, report
        self._promote, self._withdraw = promote, withdraw
        self._request_bytes, self._verifier = request_bytes, verifier
        self._ahead = Hold(thread=0)  # holds what is read in the background until it is there
        self.entries: dict[int, Entry] = {}  # by slot
        self.misses = self.read_ahead = 0
        self.bytes_read = 0

    def plan(self, hold: Hold, keys: Sequence[Key]) -> tuple[list[Entry], int] | None:
        """Pin the whole group for `hold`: its entries and how many are new. None without room: nothing changed."""
        missing = self.table.take(keys)
        if missing is None:
            return None
        for key in missing:
            slot = self.table.resident[key]
            self.entries[slot] = Entry(key, slot)
        entries = [self.entries[self.table.resident[key]] for key in keys]
        hold.missing = sum(not entry.ready for entry in entries)
        for entry in entries:
            entry.holds.add(hold)
            if entry.ahead and entry.jobs and not entry.ready:
                self._promote(entry.jobs)
        return entries, len(missing)

    def prefetch(self, keys: Sequence[Key], most: int) -> list[Key]:
        """Begin to read absent `keys` in the background, in this order, while fewer than `most` are under way and a
        slot can be had without waiting. Returns those begun.
        """
        spared = [key for key in keys if key in self.table.idle]  # no victims: they are wanted as well
        for key in spared:
            del self.table.idle[key]
        begun: list[Key] = []
        under_way = sum(self._ahead in entry.holds for entry in self.entries.values())
        for key in (key for key in keys if key not in self.table.resident):
            if under_way + len(begun) >= most or not self._begin_ahead(key):
                break
            begun.append(key)
        for key in spared:
            self.table.put_back(key)
        return begun

    def _begin_ahead(self, key: Key) -> bool:
        """Whether a background read of absent `key` could begin."""
        if not self.table.admit(key):
            return False
        slot = self.table.resident[key]
        entry = self.entries[slot] = Entry(key, slot, {self._ahead}, ahead=True)
        self._start(entry)
        if entry.jobs is None:  # no buffer is free: demand has them all
            self._remove(entry)
            return False
        if entry.staged:
            self._publish_ahead(entry)
        return True

    def cancel(self) -> int:
        """Give up background reads that no thread has begun and nobody waits for. Returns how many experts."""
        given_up = 0
        for entry in list(self.entries.values()):
            if entry.holds == {self._ahead} and entry.jobs and not entry.ready and self._withdraw(entry.jobs):
                self._remove(entry)
                given_up += 1
        return given_up

    def advance(self, entry: Entry, *, spread: bool = True) -> bool:
        """Take the next step that can be taken now; True when the bytes are in place. Raises what made the fill fail.
        `spread`: several threads may read the one expert; else it is one job, for fewer hand-overs.

        Any holder may take any step: one that was interrupted leaves its reads and copies to those who joined it.
        """
        if entry.cause is not None:
            raise _read_error(self._source, entry.key, entry.cause) from entry.cause
        if entry.jobs is None:
            self._start(entry, spread=spread)
        if entry.staged:
            assert entry.stage is not None
            self._arena.publish(entry.slot, entry.stage, self._source.span_bytes(entry.key[0]))
            self._arrive(entry)
        return entry.ready

    def finish(self, entry: Entry, error: Exception | None) -> bool:
        """One of the entry's jobs ended. True when somebody who waits has something to do."""
        entry.left -= 1
        if error is not None and entry.cause is None:
            entry.cause = error
        if entry.left:
            return False
        if entry.cause is not None:
            self._remove(entry)
        elif not self._arena.staged:
            self._arrive(entry)
            return not entry.holds or any(hold.missing == 0 for hold in entry.holds)
        elif entry.holds == {self._ahead}:
            self._publish_ahead(entry)
        elif not entry.holds:  # on a device the holders copy; here nobody is left who would
            self._remove(entry)
        return True

    def release(self, hold: Hold, entries: Iterable[Entry]) -> None:
        """`hold` is done with these entries."""
        for entry in entries:
            if hold in entry.holds:
                entry.holds.discard(hold)
                if entry.holds <= {self._ahead}:
                    self._settle(entry)

    def recover(self, hold: Hold | None, *, resubmit: bool) -> None:
        """As `release`, but from any state in which an exception may have torn `plan`, `advance`, `release` or, without
        a hold, `prefetch`.

        `resubmit`: queue unfinished jobs again, as submitting them may have been torn; false once the pool is closed.
        """
        entries = {slot: e for slot, e in self.entries.items() if self.table.resident.get(e.key) == slot}
        for entry in entries.values():
            if hold is not None:
                entry.holds.discard(hold)
        self.entries = entries
        idle = {e.key for e in entries.values() if e.ready and not e.holds}
        self.table.repair({e.key for e in entries.values()}, idle)
        for entry in list(entries.values()):
            if entry.jobs is not None and entry.left:
                if resubmit:
                    self._submit(entry.jobs)
            elif not entry.ready and entry.holds <= {self._ahead}:
                self._settle(entry)

    @property
    def held(self) -> int:
        """Slots that a lease holds."""
        return sum(bool(entry.holds - {self._ahead}) for entry in self.entries.values())

    def _start(self, entry: Entry, *, spread: bool = True) -> None:
        entry.stage = entry.stage or self._stage(entry)
        if (stage := entry.stage) is None:
            return
        if stage.borrowed:  # the source's own memory: nothing to read
            entry.jobs = []
            return
        pieces = [
            Piece(s.file_offset, stage.view[s.slot_offset : s.slot_offset + s.nbytes], s.tensor)
            for s in self._source.segments(*entry.key)
        ]
        requests = list(cut(pieces, self._request_bytes))
        groups = split_jobs(requests) if spread else [requests]
        done = self._done(entry, stage, len(groups))
        jobs = [Job(group, done, stage.wait_writable, background=entry.ahead) for group in groups]
        entry.left = len(jobs)
        entry.jobs = jobs
        self._submit(jobs)

    def _stage(self, entry: Entry) -> Stage | None:
        row = self._source.host_row(*entry.key) if self._arena.staged else None
        return self._arena.stage(entry.slot) if row is None else Stage(memoryview(b""), row, borrowed=True)

    def _done(self, entry: Entry, stage: Stage, jobs: int) -> Callable[[Exception | None], None]:
        """What a finished job calls: the report, after the checksum where this expert's is wanted."""
        if self._verifier is None or not self._verifier.wants(entry.key):
            return lambda error: self._report(entry, error)
        data = stage.view[: self._source.span_bytes(entry.key[0])]
        last = LastRead(self._verifier, entry.key, data, jobs)
        return lambda error: self._report(entry, last.after(error))

    def _publish_ahead(self, entry: Entry) -> None:
        """Copy what was read in the background to the device, on the stream kept for that."""
        assert entry.stage is not None
        try:
            self._arena.publish(entry.slot, entry.stage, self._source.span_bytes(entry.key[0]), ahead=True)
        except Exception as error:  # in a reader thread: those who join later are told
            entry.cause = error
            self._remove(entry)
            return
        self._arrive(entry)

    def _arrive(self, entry: Entry) -> None:
        entry.ready = True
        self._drop_stage(entry)
        entry.holds.discard(self._ahead)
        for hold in entry.holds:
            hold.missing -= 1
        if entry.ahead:
            self.read_ahead += 1
        else:
            self.misses += 1
        self.bytes_read += self._source.expert_nbytes(entry.key[0])
        if not entry.holds:
            self.table.put_back(entry.key)

    def _settle(self, entry: Entry) -> None:
        """Nobody holds the entry: evictable when ready, gone when no read is under way, else `finish` sees to it."""
        if entry.ready:
            self.table.put_back(entry.key)
        elif entry.cause is None and entry.staged and entry.holds:  # its holder left before the copy
            self._publish_ahead(entry)
        elif entry.cause is None and (entry.jobs is None or entry.left == 0):
            self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        self._drop_stage(entry)
        del self.entries[entry.slot]
        self.table.forget(entry.key)

    def _drop_stage(self, entry: Entry) -> None:
        stage, entry.stage = entry.stage, None
        if stage is not None:
            self._arena.recycle(stage)


def _read_error(source: ExpertSource, key: Key, cause: Exception) -> LabError:
    """A fresh exception for each waiter: threads that raise one shared object would tangle its traceback."""
    layer, expert = key
    if not isinstance(cause, CheckpointError):
        return LabError(f"{source.path}: layer {layer} expert {expert} could not be read: {cause}")
    text = str(cause).removeprefix(f"{cause.file}: ").removeprefix(f"tensor {cause.tensor!r}: ")
    return CheckpointError(
        cause.file, cause.reason, f"layer {layer} expert {expert}: {text}",
        tensor=cause.tensor, seen=cause.seen, wanted=cause.wanted,
    )  # fmt: skip
