"""What goes wrong between a disk and a cache, and what must be left when it has: rows S and F26 of the fault table."""

import errno
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from moe_lab.errors import CheckpointError, LabError
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.source import ExpertSource
from tests.support.expert_files import CountingReads, held, wanted, write_experts
from tests.support.faulty_disk import Disk, bound, slices_of, together, until, usable, waiting


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def source(tmp_path: Path, disk: Disk) -> ExpertSource:
    return write_experts(tmp_path / "x.bin", read_call=disk)


class TestSlots:
    def test_s01_a_full_cache_waits_for_a_lease_to_end(self, source: ExpertSource):
        with bound(source, slots=2) as cache:
            leases = [cache.lease(source, 0, [0]), cache.lease(source, 0, [1])]
            before = [held(lease) for lease in leases]

            def third(_: int) -> list:
                with cache.lease(source, 0, [2]) as lease:
                    return held(lease)

            def free_one() -> None:
                until(lambda: waiting(cache) == 1)
                assert [held(lease) for lease in leases] == before
                leases[0].release()

            results = together(2, lambda i: third(i) if i else free_one())
            assert results == [None, wanted(source, 0, [2])]
            assert held(leases[1]) == before[1]

    def test_s01_a_full_cache_says_so_after_the_deadline(self, source: ExpertSource):
        with bound(source, slots=2) as cache:
            leases = [cache.lease(source, 0, [0]), cache.lease(source, 0, [1])]
            before = [held(lease) for lease in leases]
            (error,) = together(1, lambda _: cache.lease(source, 0, [2], timeout_s=0.05))
            assert isinstance(error, LabError)
            assert "cache full: 2 in use of slots=2, and none got free in 0.05 s" in str(error)
            assert [held(lease) for lease in leases] == before

    def test_s01_a_thread_that_holds_all_slots_itself_is_told_at_once(self, source: ExpertSource):
        with bound(source, slots=2) as cache, cache.lease(source, 0, [0]), cache.lease(source, 0, [1]):
            begin = time.monotonic()
            with pytest.raises(LabError, match="cache full: 2 in use of slots=2, and this thread holds them itself"):
                cache.lease(source, 0, [1, 2])
            assert time.monotonic() - begin < 5
            with cache.lease(source, 0, [0, 1]) as again:  # what it holds already needs no slot
                assert again.hits == 2

    def test_s01_a_request_that_cannot_fit_beside_the_threads_own_lease_is_told_at_once(self, source: ExpertSource):
        with bound(source, slots=2) as cache, cache.lease(source, 0, [0]):
            begin = time.monotonic()
            with pytest.raises(LabError, match="cache full: 1 in use of slots=2, and this thread"):
                cache.lease(source, 0, [1, 2])
            assert time.monotonic() - begin < 5
            cache.lease(source, 0, [1]).release()

    def test_s02_more_experts_than_slots_equal_the_resident_result(self, tmp_path: Path):
        reads = CountingReads()
        source = write_experts(tmp_path / "x.bin", read_call=reads)

        def total(slots: int) -> int:
            summed = 0
            with bound(source, slots=slots) as cache:
                for wave in cache.waves([0, 1, 2, 3, 4, 5]):
                    with cache.lease(source, 0, wave) as lease:
                        for part in ("gate", "up", "down"):
                            summed += int(lease.views(part)[lease.slots.long()].long().sum())
            return summed

        resident = total(8)
        reads.calls.clear()
        assert total(2) == resident
        assert len(reads.calls) == len(set(reads.calls)) == 6 * 3

    def test_s13_one_worker_serves_four_threads_on_two_slots(self, source: ExpertSource):
        def work(seed: int) -> int:
            rng = np.random.default_rng(seed)
            for _ in range(200):
                experts = rng.choice(8, rng.integers(1, 3), replace=False).tolist()
                with cache.lease(source, seed % 2, experts, timeout_s=20) as lease:
                    assert held(lease) == wanted(source, seed % 2, experts)
            return 200

        with bound(source, slots=2, threads=1) as cache:
            assert together(4, work, within_s=10) == [200] * 4
            usable(cache, source)

    def test_s17_a_request_for_nothing_touches_nothing(self, source: ExpertSource, disk: Disk):
        with bound(source, slots=1) as cache, cache.lease(source, 0, [3]):
            disk.calls.clear()
            cache.lease(source, 0, []).release()  # although every slot is held
            assert disk.calls == []
            assert (cache.hits, cache.misses) == (0, 1)


class TestReads:
    def test_s04_simultaneous_misses_of_one_expert_read_it_once(self, source: ExpertSource, disk: Disk):
        disk.delay_s = 0.05
        start = threading.Barrier(8)

        def ask(_: int) -> list:
            start.wait(10)
            with cache.lease(source, 0, [3]) as lease:
                return held(lease)

        with bound(source, slots=4) as cache:
            assert together(8, ask) == [wanted(source, 0, [3])] * 8
            assert len(disk.calls) == 3  # gate, up, down
            assert list(cache._partitions[0].table.resident) == [(0, 3)]
            assert (cache.misses, cache.hits) == (1, 7)
            assert cache.bytes_read == source.expert_nbytes(0)

    def test_s05_all_waiters_get_the_error_and_the_next_request_loads(self, source: ExpertSource, disk: Disk):
        disk.open.clear()
        disk.errors = [errno.ESTALE]
        with bound(source, slots=2) as cache:

            def let_it_fail() -> None:
                until(lambda: waiting(cache) == 8)
                disk.open.set()

            results = together(9, lambda i: cache.lease(source, 0, [3]) if i else let_it_fail())
            errors = results[1:]
            assert all(isinstance(error, CheckpointError) for error in errors)
            assert len({id(error) for error in errors}) == 8
            told = [re.fullmatch(r"(.*: )request (\d+): (.*)", str(error)) for error in errors]
            assert {(m[1], m[3]) for m in told if m} == {
                (
                    f"{source.path}: tensor 'blk.0.gate': ",
                    "layer 0 expert 3: reading at byte 217 failed: Stale file handle.",
                )
            }
            assert len({m[2] for m in told if m}) == 8  # each waiter's own request
            assert (cache.hits, cache.misses) == (0, 0)
            with cache.lease(source, 0, [3]) as lease:
                assert held(lease) == wanted(source, 0, [3])
            usable(cache, source)

    @pytest.mark.parametrize("fails", range(1, 7), ids="read{}".format)
    def test_s05_a_group_survives_the_failure_of_any_one_read(self, source: ExpertSource, disk: Disk, fails: int):
        def nth(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            count[0] += 1
            if count[0] == fails:
                raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
            return os.preadv(fd, buffers, offset)

        count = [0]
        broken = ExpertSource(source.path, slices_of(source), read_call=nth)
        with bound(broken, slots=3) as cache:
            with pytest.raises(CheckpointError, match=r"layer 1 expert [245]: "):
                cache.lease(broken, 1, [2, 4, 5])
            usable(cache, broken)

    def test_s07_short_reads_are_continued(self, source: ExpertSource, disk: Disk):
        disk.most_bytes = 5
        with bound(source, slots=3) as cache, cache.lease(source, 1, [0, 7, 4]) as lease:
            assert held(lease) == wanted(source, 1, [0, 7, 4])

    def test_s07_an_early_end_is_an_error_with_the_numbers(self, source: ExpertSource, tmp_path: Path):
        down = source.segments(1, 6)[2]

        def ends_early(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            room = max(0, down.file_offset + 11 - offset)
            return os.preadv(fd, [buffers[0][: min(5, room)]], offset) if room else 0

        broken = ExpertSource(source.path, slices_of(source), read_call=ends_early)
        with bound(broken, slots=1) as cache:
            with pytest.raises(CheckpointError) as info:
                cache.lease(broken, 1, [6])
            assert (info.value.reason, info.value.tensor) == ("truncated", "blk.1.down")
            assert (info.value.seen, info.value.wanted) == (11, down.nbytes)
            where, numbers = f"byte {down.file_offset + 11}", f"{down.nbytes} bytes wanted"
            for told in (str(source.path), "layer 1 expert 6", where, numbers, "11 came"):
                assert told in str(info.value)
            with cache.lease(broken, 1, [5]) as lease:
                assert held(lease) == wanted(broken, 1, [5])

    def test_f26_seven_bytes_a_call_give_the_exact_bytes(self, source: ExpertSource, disk: Disk):
        disk.most_bytes = 7
        with bound(source, slots=8) as cache:
            usable(cache, source)

    def test_one_device_error_is_retried_two_are_told(self, source: ExpertSource, disk: Disk):
        with bound(source, slots=1, threads=1) as cache:
            disk.errors = [errno.EIO]
            cache.lease(source, 0, [1]).release()
            disk.errors = [errno.EIO, errno.EIO]
            with pytest.raises(CheckpointError, match=r"layer 0 expert 2: .*Input/output error"):
                cache.lease(source, 0, [2])
            usable(cache, source)

    def test_a_file_cut_after_binding_is_an_error_not_a_bus_error(self, source: ExpertSource):
        with bound(source, slots=2) as cache:
            os.truncate(source.path, source.segments(1, 3)[0].file_offset)
            with pytest.raises(CheckpointError, match=r"layer 1 expert 3: .*changed") as info:
                cache.lease(source, 1, [3])
            assert info.value.reason == "changed"
            with pytest.raises(CheckpointError, match="changed"):  # nor is what is still there taken for the model
                cache.lease(source, 0, [3])

    def test_a_file_deleted_after_binding_is_still_readable(self, source: ExpertSource):
        with bound(source, slots=8) as cache:
            source.path.unlink()
            usable(cache, source)

    def test_a_file_replaced_before_binding_is_refused(self, source: ExpertSource):
        source.path.write_bytes(source.path.read_bytes() + b"longer")
        with ExpertCache(slots=2) as cache, pytest.raises(CheckpointError, match="changed since its header was read"):
            cache.bind(source, "cpu")

    def test_a_slow_disk_is_waited_for_and_the_wait_is_told(self, source: ExpertSource, disk: Disk):
        disk.delay_s = 0.03
        with bound(source, slots=2) as cache, cache.lease(source, 0, [1]) as lease:
            assert 90 <= lease.wait_ms < 5000  # three reads in one job, one after another

    def test_many_threads_and_random_failures_lose_nothing(self, source: ExpertSource):
        rng, lock = np.random.default_rng(5), threading.Lock()

        def flaky(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            with lock:
                lot = rng.random()
            if lot < 0.03 and failing[0]:
                raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
            return os.preadv(fd, [buffers[0][: 1 + int(lot * 80)]], offset)

        failing = [True]
        flaky_source = ExpertSource(source.path, slices_of(source), read_call=flaky)

        def work(seed: int) -> tuple[int, int, int]:
            mine = np.random.default_rng(seed)
            asked, right, failed = 0, 0, 0
            for _ in range(60):
                layer, experts = int(mine.integers(2)), mine.choice(8, 3, replace=False).tolist()
                asked += 1
                try:
                    with cache.lease(flaky_source, layer, experts) as lease:
                        assert held(lease) == wanted(flaky_source, layer, experts)
                        right += 1
                except CheckpointError:
                    failed += 1
            return asked, right, failed

        with bound(flaky_source, slots=7, threads=3) as cache:
            counts = np.array(together(3, work, within_s=60))
            assert (counts[:, 0] == counts[:, 1] + counts[:, 2]).all()
            assert counts[:, 2].sum() > 0, "no read failed: the test tested nothing"
            assert cache.bytes_read == cache.misses * source.expert_nbytes(0)
            failing[0] = False
            usable(cache, flaky_source)
