"""The life of an expert in the cache: reserved, filling, (staged,) ready, gone. Steps that never wait.

    RESERVED --submit--> FILLING --last job--> READY            (host arena)
                                 --last job--> STAGED --copy--> READY   (device arena)
             --from page-locked memory-------> STAGED --copy--> READY   (device arena)

A slot is evicted only when it is READY and no lease holds it. On a device READY means that the copy is queued: work
that reads the slot waits for it on the device. The thread that ends the last job queues the copy, so that a caller may
compute meanwhile. Every method runs under the cache's lock and never blocks; waiting is the cache's job, so tests can
drive these steps in any order without threads.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from moe_lab.stream import journal as note
from moe_lab.stream.arena import DeviceArena, HostArena
from moe_lab.stream.entry import Entry, Hold, read_error
from moe_lab.stream.events import DEMAND, HIT, LATE, MISS, NONE, PREFETCH
from moe_lab.stream.jobs import JOB_BYTES, REQUEST_BYTES, GivenUp, Job, Piece, cut, split_jobs
from moe_lab.stream.journal import Journal, reader_number
from moe_lab.stream.policy import Key
from moe_lab.stream.slots import SlotTable
from moe_lab.stream.source import ExpertSource
from moe_lab.stream.stages import Stage
from moe_lab.stream.verify import LastRead, Verifier

Submit = Callable[[Sequence[Job]], None]
Promote = Callable[[Sequence[Job]], None]
GiveUp = Callable[[Sequence[Job]], Any]
Report = Callable[["Entry", Exception | None], None]
_NO_BYTES = memoryview(b"")


class Partition:
    """The slots of one layer, or of all layers, with their entries.

    `report` is called from reader threads with every finished job's entry; it must end in `finish` under the lock.
    `promote` and `give_up` are the pool's. `on_arrive(key, slot)` is told of each expert whose bytes are in place.
    Totals of finished fills: `misses` (experts that a request found absent), `read_ahead` (experts read in the
    background), `bytes_read` of both; `bytes_dropped`: read of experts that were given up on their way.
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
        give_up: GiveUp = lambda jobs: None,
        request_bytes: int = REQUEST_BYTES,
        verifier: Verifier | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.table, self._source, self._arena = table, source, arena
        self._submit, self._report = submit, report
        self._promote, self._give_up = promote, give_up
        self._request_bytes, self._verifier = request_bytes, verifier
        self._journal = journal or Journal()
        self.on_arrive: Callable[[Key, int], None] = lambda key, slot: None
        self._ahead = Hold(thread=0)  # holds what is read in the background until it is there
        self.entries: dict[int, Entry] = {}  # by slot
        self.under_way: set[Entry] = set()  # those that `_ahead` holds
        self.misses = self.read_ahead = 0
        self.bytes_read = self.bytes_dropped = 0

    def plan(self, hold: Hold, keys: Sequence[Key]) -> tuple[list[Entry], int] | None:
        """Pin the whole group for `hold`: its entries and how many are new. None without room: nothing changed."""
        missing = self.table.take(keys)
        if missing is None:
            return None
        for key in missing:
            self._place(key, set(), ahead=False)
        entries = [self.entries[self.table.resident[key]] for key in keys]
        hold.missing = sum(not entry.ready for entry in entries)
        for entry in entries:
            if self._journal.log is not None:
                found = HIT if entry.ready else LATE if entry.jobs is not None or entry.holds else MISS
                self._journal.entry(note.USED, entry, found, hold.request)
            entry.holds.add(hold)
            if entry.ahead and entry.jobs and not entry.ready:
                self._journal.entry(note.PROMOTED, entry, request=hold.request)
                self._promote(entry.jobs)
        return entries, len(missing)

    def prefetch(self, keys: Sequence[Key], most: int, spared: Iterable[Key] = ()) -> list[Key]:
        """Begin to read absent `keys` in the background, in this order, while fewer than `most` are under way and a
        slot can be had without waiting; neither they nor `spared` become victims. Returns those begun.
        """
        kept = [key for key in dict.fromkeys((*keys, *spared)) if key in self.table.idle]
        for key in kept:
            del self.table.idle[key]
        begun: list[Key] = []
        for key in (key for key in keys if key not in self.table.resident):
            if len(self.under_way) >= most or not self._begin_ahead(key):
                break
            begun.append(key)
            if key in self.table.idle:  # there at once: the next one must not push it out, as by frequency it would
                del self.table.idle[key]
                kept.append(key)
        for key in kept:
            self.table.put_back(key)
        return begun

    def _begin_ahead(self, key: Key) -> bool:
        """Whether a background read of absent `key` could begin."""
        if not self.table.admit(key):
            return False
        entry = self._place(key, {self._ahead}, ahead=True)
        self.under_way.add(entry)
        self._start(entry)
        if entry.jobs is None:  # no buffer is free: demand has them all
            self._remove(entry)
            return False
        if entry.staged:
            self._bring(entry)
        return True

    def cancel(self, unwanted: Callable[[Key], bool] = lambda key: True) -> int:
        """Give up background reads that nobody waits for; one that is being read ends at its next piece, unless that
        was the last. Returns how many experts.
        """
        count = 0
        for entry in list(self.under_way):
            if entry.holds == {self._ahead} and entry.jobs and not entry.ready and unwanted(entry.key):
                self._give_up(entry.jobs)
                count += 1
                if not entry.reading and entry.given_up:
                    self._drop(entry)
        return count

    def _drop(self, entry: Entry) -> None:
        """A read that was given up is over: what it brought in is lost."""
        nbytes = sum(job.read_bytes for job in entry.jobs or ())
        self.bytes_dropped += nbytes
        self._journal.entry(note.DROPPED, entry, nbytes)
        self._remove(entry)

    def advance(self, entry: Entry, *, spread: bool = True, request: int = NONE) -> bool:
        """Take the next step that can be taken now; True when the bytes are in place. Raises what made the fill fail,
        with `request`'s number. `spread`: several threads may read the expert; else it is one job: fewer hand-overs.

        Any holder may take any step: one that was interrupted leaves its reads and copies to those who joined it.
        """
        if entry.cause is None and entry.jobs is None:
            self._start(entry, spread=spread)
        if entry.cause is None and entry.staged:
            self._bring(entry)
        if entry.cause is not None:
            raise read_error(self._source, entry.key, entry.cause, request) from entry.cause
        return entry.ready

    def finish(self, entry: Entry, error: Exception | None) -> bool:
        """One of the entry's jobs ended. True when somebody who waits has something to do."""
        entry.left -= 1
        if isinstance(error, GivenUp):
            entry.stopped = True
        elif error is not None and entry.cause is None:
            entry.cause = error
        if entry.reading:
            return False
        if entry.cause is None and entry.given_up:
            return self._end_given_up(entry)
        if entry.cause is None:
            if self._journal.log is not None:
                self._journal.entry(note.DONE, entry, reader_number())
            self._bring(entry)
        else:
            self._remove(entry)
        return entry.cause is not None or not entry.holds or any(not hold.missing for hold in entry.holds)

    def _end_given_up(self, entry: Entry) -> bool:
        """The last job of a read that was given up has ended; somebody may have asked for the expert meanwhile."""
        if entry.holds <= {self._ahead}:
            self._drop(entry)
            return True
        entry.stopped = False
        self._start(entry)
        return False

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
        self.under_way = {e for e in entries.values() if self._ahead in e.holds}
        idle = {e.key for e in entries.values() if e.ready and not e.holds}
        self.table.repair({e.key for e in entries.values()}, idle)
        for slot in self.table.free if self._arena.poisoned else ():  # one may be an evicted expert's, unfilled since
            self._arena.freed(slot)
        for entry in list(entries.values()):
            if entry.jobs is not None and entry.reading:
                if resubmit:
                    self._submit(entry.jobs)
            elif not entry.ready and entry.holds <= {self._ahead}:
                self._settle(entry)

    @property
    def held(self) -> int:
        """Slots that a lease holds."""
        return sum(bool(entry.holds - {self._ahead}) for entry in self.entries.values())

    def _place(self, key: Key, holds: set[Hold], *, ahead: bool) -> Entry:
        """A new entry for a key that has just got its slot."""
        slot, read = self.table.resident[key], self._journal.name()
        if (old := self.entries.get(slot)) is not None:
            self._journal.entry(note.EVICTED, old, PREFETCH if ahead else DEMAND, read)
            self._arena.freed(slot)
        entry = self.entries[slot] = Entry(key, slot, holds, ahead=ahead, read=read)
        return entry

    def _start(self, entry: Entry, *, spread: bool = True) -> None:
        entry.stage = entry.stage or self._stage(entry)
        if (stage := entry.stage) is None:
            return
        if self._journal.log is not None:
            self._journal.entry(note.QUEUED, entry, PREFETCH if entry.ahead else DEMAND, _request_of(entry))
        if stage.borrowed:  # the source's own memory: nothing to read
            entry.jobs = []
            return
        pieces = [
            Piece(s.file_offset, stage.view[s.slot_offset : s.slot_offset + s.nbytes], s.tensor, self._request_bytes)
            for s in self._source.segments(*entry.key)
        ]
        ahead = entry.holds == {self._ahead}
        most = max(JOB_BYTES, self._request_bytes)
        groups = split_jobs(cut(pieces, most), JOB_BYTES) if spread else [pieces]
        done = self._done(entry, stage, len(groups))
        begin = self._journal.starting(entry, stage.wait_writable)
        jobs = [Job(group, done, begin, background=ahead) for group in groups]
        entry.left = len(jobs)
        entry.jobs = jobs
        self._submit(jobs)

    def _stage(self, entry: Entry) -> Stage | None:
        row = self._source.host_row(*entry.key) if self._arena.staged else None
        return self._arena.stage(entry.slot) if row is None else Stage(_NO_BYTES, row, borrowed=True)

    def _done(self, entry: Entry, stage: Stage, jobs: int) -> Callable[[Exception | None], None]:
        """What a finished job calls: the report, after the checksum where this expert's is wanted and, in host memory,
        the packing into the slot's layout."""
        layer, steps = entry.key[0], []
        if self._verifier is not None and self._verifier.wants(entry.key):
            steps.append(partial(self._verifier.check, entry.key, stage.view[: self._source.span_bytes(layer)]))
        if self._arena.packs and (packing := self._source.packing(layer)) is not None:
            assert stage.tensor is not None
            steps.append(partial(packing, stage.tensor, self._arena.tensor[entry.slot]))
        if not steps:
            return lambda error: self._report(entry, error)
        last = LastRead(jobs, steps)
        return lambda error: self._report(entry, last.after(error))

    def _bring(self, entry: Entry) -> None:
        """All bytes are read: queue their copy where there is one, in the lane of who wants them, and the expert is
        there. A copy that cannot be queued is the read's failure: all who hold the entry are told."""
        assert entry.stage is not None
        if self._arena.staged:
            ahead = entry.holds <= {self._ahead}
            try:
                layer = entry.key[0]
                how = {"ahead": ahead, "packing": self._source.packing(layer)}
                self._arena.publish(entry.slot, entry.stage, self._source.span_bytes(layer), **how)
            except Exception as error:
                entry.cause = error
                self._remove(entry)
                return
            self._journal.entry(note.COPIED, entry)
        self._arrive(entry)

    def _arrive(self, entry: Entry) -> None:
        entry.ready = True
        self._drop_stage(entry)
        entry.holds.discard(self._ahead)
        self.under_way.discard(entry)
        for hold in entry.holds:
            hold.missing -= 1
        if entry.ahead:
            self.read_ahead += 1
        else:
            self.misses += 1
        nbytes = self._source.expert_nbytes(entry.key[0])
        self.bytes_read += nbytes
        self._journal.entry(note.READY, entry, nbytes)
        if not entry.holds:
            self.table.put_back(entry.key)
        self.on_arrive(entry.key, entry.slot)

    def _settle(self, entry: Entry) -> None:
        """No request holds the entry: evictable when ready, gone when no read is under way, else `finish` sees to it.
        STAGED it is only where an interrupt tore the copy: then it is gone as well."""
        if entry.ready:
            self.table.put_back(entry.key)
        elif entry.cause is None and (entry.jobs is None or not entry.reading):
            self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        if entry.cause is not None:
            self._journal.entry(note.FAILED, entry)
        self.under_way.discard(entry)
        self._drop_stage(entry)
        del self.entries[entry.slot]
        self.table.forget(entry.key)
        self._arena.freed(entry.slot)

    def _drop_stage(self, entry: Entry) -> None:
        stage, entry.stage = entry.stage, None
        if stage is not None:
            self._arena.recycle(stage)


def _request_of(entry: Entry) -> int:
    """The number of a request that waits for a read; NONE for one that only a prefetch asked for."""
    return max((hold.request for hold in entry.holds), default=-1)


__all__ = ["Entry", "Hold", "Partition"]
