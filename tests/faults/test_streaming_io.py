"""Faults of the disk through every way of reading, and what a cache leaves behind: rows S and the table of streaming
failures.
"""

import errno
import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_lab.errors import CheckpointError, LabError
from moe_lab.stream import requests, room
from moe_lab.stream.access import serves_direct
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.faults import FaultyReads
from moe_lab.stream.memory_source import MemorySource
from moe_lab.stream.pack import pack
from moe_lab.stream.packed import PackedSource
from moe_lab.stream.source import ExpertSource
from tests.support.expert_files import held, wanted, write_experts
from tests.support.faulty_disk import bound, until, usable, waiting

SHAPES = ((40, 50), (40, 50), (50, 41))  # f32: parts of 8,000 and 8,200 bytes, no multiple of a block


@pytest.fixture
def source(tmp_path: Path) -> ExpertSource:
    made = write_experts(tmp_path / "model.bin", shapes=lambda _: SHAPES)
    made.model_hash = "cafe"
    return made


@pytest.fixture(params=["in-place", "packed"])
def file(request: pytest.FixtureRequest, source: ExpertSource, tmp_path: Path) -> ExpertSource:
    """A model's file, and what was packed of it."""
    return source if request.param == "in-place" else PackedSource(pack(source, tmp_path / "x.experts").path)


@pytest.fixture(params=["direct", "dropped", "buffered"])
def io(request: pytest.FixtureRequest, source: ExpertSource) -> Any:
    if request.param == "direct" and not serves_direct(source.path):
        pytest.skip("this file system serves no direct reads")
    return request.param


class TestReads:
    @pytest.mark.parametrize("short", [512, 4096, 12_288], ids="short{}".format)
    def test_s07_short_reads_are_continued(self, file: ExpertSource, io: Any, short: int):
        reads = FaultyReads(short=short)
        with bound(file.reading_through(reads), slots=5, io=io) as cache:
            usable(cache, file)
            assert cache.io_mode == io
        assert reads.calls > 16

    def test_interrupted_calls_are_made_again(self, file: ExpertSource, io: Any):
        reads = FaultyReads(errors=dict.fromkeys(range(1, 400, 3), errno.EINTR))
        with bound(file.reading_through(reads), slots=5, io=io) as cache:
            usable(cache, file)

    def test_one_device_error_is_retried_two_are_told_and_the_next_request_reads(self, file: ExpertSource, io: Any):
        reads = FaultyReads(errors={1: errno.EIO})
        with bound(file.reading_through(reads), slots=2, threads=1, io=io) as cache:
            with cache.lease(cache._source, 0, [1]) as lease:  # type: ignore[arg-type]
                assert held(lease) == wanted(file, 0, [1])
            reads.errors = {reads.calls + 1: errno.EIO, reads.calls + 2: errno.EIO}
            with pytest.raises(CheckpointError, match=r"layer 0 expert 2: .*Input/output error"):
                cache.lease(cache._source, 0, [2])  # type: ignore[arg-type]
            reads.errors = {}
            usable(cache, cache._source)  # type: ignore[arg-type]

    def test_an_early_end_says_what_was_wanted_and_what_came(self, file: ExpertSource, io: Any):
        last = file.segments(1, 6)[-1]
        reads = FaultyReads(ends_at=last.file_offset // 4096 * 4096 + 4096)
        with bound(file.reading_through(reads), slots=1, io=io) as cache:
            with pytest.raises(CheckpointError, match="layer 1 expert 6: cut short at byte") as caught:
                cache.lease(cache._source, 1, [6])  # type: ignore[arg-type]
            assert (caught.value.reason, caught.value.wanted) == ("truncated", last.nbytes)
            assert reads.ends_at is not None
            assert caught.value.seen == reads.ends_at - last.file_offset
            reads.ends_at = None
            usable(cache, cache._source)  # type: ignore[arg-type]

    def test_a_file_cut_while_it_is_streamed_is_an_error_not_a_bus_error(self, file: ExpertSource, io: Any):
        with bound(file, slots=2, io=io) as cache:
            cache.lease(file, 0, [3]).release()
            os.truncate(file.path, file.segments(1, 3)[0].file_offset)
            with pytest.raises(CheckpointError, match=r"layer 1 expert 3: .*changed") as caught:
                cache.lease(file, 1, [3])
            assert caught.value.reason == "changed"

    def test_a_file_replaced_while_it_is_streamed_is_still_the_old_one(self, file: ExpertSource, io: Any):
        with bound(file, slots=16, io=io) as cache:
            file.path.unlink()
            file.path.write_bytes(b"another model")
            usable(cache, file)

    def test_wrong_bytes_are_caught_by_the_checksum_and_by_it_alone(
        self, source: ExpertSource, tmp_path: Path, io: Any
    ):
        packed = PackedSource(pack(source, tmp_path / "x.experts").path)
        place = packed.geometry(1).runs[1].starts[4] + 77
        for verify in ("strict", "off"):
            reads = FaultyReads(flipped={place: 0x40})
            with bound(packed.reading_through(reads), slots=3, io=io, verify=verify) as cache:  # type: ignore[arg-type]
                mine = cache._source
                assert mine is not None
                if verify == "off":
                    with cache.lease(mine, 1, [4]) as lease:
                        assert held(lease) != wanted(mine, 1, [4])  # the fault is real
                    continue
                with pytest.raises(CheckpointError, match=r"layer 1 expert 4: .*checksum"):
                    cache.lease(mine, 1, [3, 4])
                reads.flipped = {}
                usable(cache, mine)

    def test_a_slow_disk_is_a_stall_that_is_counted_and_no_error(
        self, file: ExpertSource, io: Any, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(requests, "STALL_MS", 30.0)
        reads = FaultyReads()
        with bound(file.reading_through(reads), slots=4, io=io) as cache:
            mine = cache._source
            assert mine is not None
            reads.delay_s = 0.05
            with cache.lease(mine, 0, [1]) as lease:
                assert held(lease) == wanted(mine, 0, [1])
                assert lease.wait_ms >= 50
            assert cache.stalls == 1
            cache.lease(mine, 0, [1]).release()
            assert cache.stalls == 1


class TestAllOrNothing:
    """What a bind that fails leaves: no thread, no descriptor, no memory, and a cache that can be bound afterwards."""

    def left(self) -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def test_memory_that_is_refused(self, file: ExpertSource, monkeypatch: pytest.MonkeyPatch):
        before = self.left()
        with ExpertCache(slots=3) as cache:
            with monkeypatch.context() as patch:
                patch.setattr(room, "host_block", _refuse(MemoryError("no")))
                with pytest.raises(LabError, match="cpu refused it"):
                    cache.bind(file, "cpu")
            assert self.left() == before
            cache.bind(file, "cpu")
            usable(cache, file)

    @pytest.mark.parametrize("nth", [1, 2, 4])
    def test_a_descriptor_that_is_refused(self, file: ExpertSource, nth: int, monkeypatch: pytest.MonkeyPatch):
        before, opened, real = self.left(), [0], os.open

        def few(path: Any, flags: int, *more: Any, **how: Any) -> int:
            if str(path) == str(file.path):
                opened[0] += 1
                if opened[0] == nth:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return real(path, flags, *more, **how)

        with ExpertCache(slots=3, threads=4, io="buffered") as cache:
            with monkeypatch.context() as patch:
                patch.setattr(os, "open", few)
                with pytest.raises(CheckpointError, match="cannot be opened: Too many open files"):
                    cache.bind(file, "cpu")
            assert self.left() == before
            cache.bind(file, "cpu")
            usable(cache, file)

    def test_a_checksum_that_is_not_there(self, source: ExpertSource):
        before = self.left()
        with ExpertCache(slots=3, verify="sampled") as cache, pytest.raises(LabError, match="no checksums"):
            cache.bind(source, "cpu")
        assert self.left() == before

    def test_a_model_of_many_files_shares_descriptors_between_threads(self, tmp_path: Path):
        import resource

        from moe_lab.checkpoint.expert_slice import ExpertSlice

        files = []
        for number in range(40):
            files.append(tmp_path / f"{number}.bin")
            files[-1].write_bytes(bytes([number]) * 72)
        parts = [
            ExpertSlice(f"{name}.{{expert}}", "f32", 24, (40, 2, 3), tuple((f, i * 24) for f in files))
            for i, name in enumerate("gud")
        ]
        many = ExpertSource(tmp_path, {0: parts})
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        before = len(os.listdir("/proc/self/fd"))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
            with bound(many, slots=3, threads=4) as cache:
                assert len(os.listdir("/proc/self/fd")) - before == 40
                for expert in range(40):
                    with cache.lease(many, 0, [expert]) as lease:
                        assert set(held(lease)[0]["down"]) == {expert}
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        until(lambda: len(os.listdir("/proc/self/fd")) == before)


class TestLife:
    def test_1000_caches_over_every_source_leave_nothing(self, source: ExpertSource, tmp_path: Path):
        packed = PackedSource(pack(source, tmp_path / "x.experts").path)
        kept = MemorySource(source)
        ways: list[tuple[ExpertSource, dict[str, Any]]] = [
            (source, {"io": "direct"}), (source, {"io": "dropped"}), (packed, {"io": "direct", "verify": "strict"}),
            (kept, {}),
        ]  # fmt: skip
        if not serves_direct(source.path):
            ways = [(s, {**how, "io": "buffered"}) for s, how in ways]

        def once(number: int) -> None:
            mine, how = ways[number % len(ways)]
            cache = ExpertCache(slots=2, threads=2, **how)
            cache.bind(mine, "cpu")
            cache.prefetch(mine, 1, [number % 8])
            cache.lease(mine, 0, [number % 8]).release()
            if number % 3:
                cache.close()  # the others are left to the collector

        for number in range(len(ways)):
            once(number)
        gc.collect()
        until(lambda: threading.active_count() == 1)
        files, grown = len(os.listdir("/proc/self/fd")), _resident_bytes()
        for number in range(1000):
            once(number)
        until(lambda: threading.active_count() == 1)
        until(lambda: len(os.listdir("/proc/self/fd")) == files)
        assert _resident_bytes() - grown < 20 << 20  # a slot a cache would be 50 MB

    def test_an_interrupt_while_direct_reads_are_under_way_leaves_a_usable_cache(self, file: ExpertSource, io: Any):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        reads = FaultyReads(delay_s=0.2)
        try:
            with bound(file.reading_through(reads), slots=3, io=io) as cache:
                mine = cache._source
                assert mine is not None

                def press() -> None:
                    until(lambda: waiting(cache) == 1)
                    os.kill(os.getpid(), signal.SIGINT)

                threading.Thread(target=press, daemon=True).start()
                with pytest.raises(KeyboardInterrupt):
                    cache.lease(mine, 0, [1, 2])
                reads.delay_s = 0.0
                usable(cache, mine)
        finally:
            signal.signal(signal.SIGINT, before)


def _refuse(error: BaseException) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> None:
        raise error

    return refuse


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
