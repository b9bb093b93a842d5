"""Background reads: promoted when wanted, never read twice, never in the way of demand; host and pretended GPU."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_lab.errors import LabError
from moe_lab.stream import cache as cache_module
from moe_lab.stream import setup
from moe_lab.stream.arena import DeviceArena
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.source import ExpertSource
from tests.support.expert_files import expert_bytes, held, wanted, write_experts
from tests.support.fake_cuda import FakeCuda, LateArena
from tests.support.faulty_disk import Disk, bound, until, usable


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def source(tmp_path: Path, disk: Disk) -> ExpertSource:
    return write_experts(tmp_path / "x.bin", read_call=disk)


def arrived(cache: ExpertCache, count: int) -> None:
    until(lambda: cache.read_ahead == count)


class TestOnTheHost:
    def test_what_was_read_ahead_is_a_hit_and_counted_apart(self, source: ExpertSource, disk: Disk):
        with bound(source, slots=4, threads=4) as cache:
            assert cache.prefetch(source, 0, [5, 2]) == [5, 2]
            arrived(cache, 2)
            disk.calls.clear()
            with cache.lease(source, 0, [2, 5]) as lease:
                assert held(lease) == wanted(source, 0, [2, 5])
                assert (lease.hits, lease.late_hits, lease.misses, lease.bytes_read) == (2, 0, 0, 0)
            assert disk.calls == []
            assert (cache.hits, cache.misses, cache.read_ahead) == (2, 0, 2)
            assert cache.bytes_read == 2 * source.expert_nbytes(0)
            usable(cache, source)

    def test_a_demand_for_one_on_its_way_waits_for_it_and_reads_nothing(self, source: ExpertSource, disk: Disk):
        disk.open.clear()
        with bound(source, slots=4, threads=2) as cache:
            assert cache.prefetch(source, 0, [3]) == [3]
            threading.Timer(0.05, disk.open.set).start()
            with cache.lease(source, 0, [3]) as lease:
                assert held(lease) == wanted(source, 0, [3])
                assert (lease.hits, lease.late_hits, lease.misses) == (1, 1, 0)
            assert len(disk.calls) == 3  # gate, up, down, once each
            usable(cache, source)

    def test_a_promoted_expert_passes_those_that_nobody_waits_for(self, source: ExpertSource, disk: Disk):
        disk.open.clear()
        with bound(source, slots=8, threads=1) as cache:
            cache._pool.background = 4  # type: ignore[union-attr]
            assert cache.prefetch(source, 0, [0, 1, 2, 3]) == [0, 1, 2, 3]
            until(lambda: len(disk.calls) == 1)
            threading.Timer(0.05, disk.open.set).start()
            cache.lease(source, 0, [3]).release()
            first = {e: source.segments(0, e)[0].file_offset for e in range(4)}
            order = [offset for offset in disk.calls if offset in first.values()]
            assert order[:2] == [first[0], first[3]]
            arrived(cache, 4)
            usable(cache, source)

    def test_the_limit_and_full_slots_leave_the_rest_unread(self, source: ExpertSource, disk: Disk):
        disk.open.clear()
        with bound(source, slots=3, threads=4) as cache:
            assert cache.prefetch(source, 0, [0, 1, 2, 3]) == [0, 1]  # half of the threads
            assert cache.prefetch(source, 0, [4]) == []
            assert cache.prefetch(source, 0, [1]) == []  # on its way already
            disk.open.set()
            arrived(cache, 2)
            with cache.lease(source, 0, [5, 6, 7]):
                assert cache.prefetch(source, 0, [1]) == []  # no slot that nobody holds
            usable(cache, source)

    def test_demand_takes_slots_from_what_was_read_ahead_but_not_while_it_is_read(
        self, source: ExpertSource, disk: Disk
    ):
        with bound(source, slots=2, threads=4) as cache:
            cache.prefetch(source, 0, [0, 1])
            arrived(cache, 2)
            with cache.lease(source, 0, [2, 3]) as lease:
                assert held(lease) == wanted(source, 0, [2, 3])
            disk.open.clear()
            cache.prefetch(source, 0, [4])
            until(lambda: len(disk.calls) >= 13)
            with pytest.raises(LabError, match="cache full"):
                cache.lease(source, 0, [5, 6], timeout_s=0.05)
            disk.open.set()
            usable(cache, source)

    def test_given_up_reads_free_their_slots_and_wanted_ones_stay(self, source: ExpertSource, disk: Disk):
        disk.open.clear()
        with bound(source, slots=8, threads=1) as cache:
            cache._pool.background = 4  # type: ignore[union-attr]
            blocker = threading.Thread(target=lambda: cache.lease(source, 1, [7]).release())
            blocker.start()
            until(lambda: len(disk.calls) == 1)
            cache.prefetch(source, 0, [0, 1, 2])
            joined = threading.Thread(target=lambda: cache.lease(source, 0, [1]).release())
            joined.start()
            until(lambda: any(len(entry.holds) == 2 for entry in cache._partitions[0].entries.values()))
            assert cache.cancel_prefetches() == 2
            assert set(cache._partitions[0].table.resident) == {(1, 7), (0, 1)}
            disk.open.set()
            blocker.join(10)
            joined.join(10)
            assert len(disk.calls) == 6  # the blocker's and expert 1's
            usable(cache, source)

    def test_a_guess_that_turns_out_wrong_ends_at_its_next_piece_and_its_bytes_are_told(
        self, source: ExpertSource, disk: Disk
    ):
        disk.open.clear()
        with bound(source, slots=4, threads=2) as cache:
            assert cache.prefetch(source, 0, [3]) == [3]
            until(lambda: len(disk.calls) == 1)
            cache.settle(0, [5])
            assert (0, 3) in cache._partitions[0].table.resident  # until its reader says so
            disk.open.set()
            until(lambda: not cache._partitions[0].table.resident)
            assert len(disk.calls) == 1
            assert (cache.read_ahead, cache.bytes_read) == (0, 0)
            assert cache.bytes_dropped == source.segments(0, 3)[0].nbytes
            usable(cache, source)

    def test_a_guess_given_up_and_then_asked_for_is_read_again_at_once(self, source: ExpertSource, disk: Disk):
        disk.open.clear()
        with bound(source, slots=4, threads=2) as cache:
            cache.prefetch(source, 0, [3])
            until(lambda: len(disk.calls) == 1)
            cache.settle(0, [5])
            job = cache._partitions[0].entries[cache._partitions[0].table.resident[0, 3]].jobs[0]
            with cache.lease(source, 0, [3], wait=False) as lease:
                job.stop = True  # as if the reader had looked before the promotion took it back
                disk.open.set()
                lease.wait()
                assert held(lease) == wanted(source, 0, [3])
                assert (lease.hits, lease.misses) == (1, 0)
            assert len(disk.calls) == 4  # one piece for nothing, then all three
            usable(cache, source)

    def test_a_failed_background_read_is_tried_again_by_the_next_request(self, source: ExpertSource, disk: Disk):
        with bound(source, slots=3, threads=1) as cache:
            disk.errors = [5, 5]
            cache.prefetch(source, 0, [3])
            until(lambda: (0, 3) not in cache._partitions[0].table.resident)
            with cache.lease(source, 0, [3]) as lease:
                assert (lease.misses, held(lease)) == (1, wanted(source, 0, [3]))
            assert cache.read_ahead == 0
            usable(cache, source)

    def test_closing_with_background_reads_under_way_ends_them(self, source: ExpertSource, disk: Disk):
        disk.open.clear()
        cache = ExpertCache(slots=4, threads=2)
        cache.bind(source, "cpu")
        cache.prefetch(source, 0, [1, 2])
        threading.Timer(0.05, disk.open.set).start()
        cache.close()
        with pytest.raises(LabError, match="closed"):
            cache.prefetch(source, 0, [3])

    @pytest.mark.parametrize("threads", [1, 3], ids="threads{}".format)
    def test_s16_reading_ahead_changes_no_byte_and_no_count_of_requests(self, tmp_path: Path, threads: int):
        source = write_experts(tmp_path / "x.bin")
        rng = np.random.default_rng(threads)
        with bound(source, slots=5, threads=threads) as cache:
            asked = 0
            for _ in range(150):
                layer, experts = int(rng.integers(2)), rng.choice(8, 3, replace=False).tolist()
                guess = [int(e) for e in rng.choice(8, 3, replace=False)]
                cache.prefetch(source, 1 - layer, guess)
                with cache.lease(source, layer, experts) as lease:
                    assert held(lease) == wanted(source, layer, experts)
                    cache.prefetch(source, layer, guess)
                asked += 3
                if rng.random() < 0.1:
                    cache.cancel_prefetches()
            assert cache.hits + cache.misses == asked
            assert cache.read_ahead > 0
            cache.cancel_prefetches()
            until(lambda: not any(entry.holds for entry in cache._partitions[0].entries.values()))
            usable(cache, source)


class TestOnAGpu:
    """The pretended one: copies happen when a stream gets to them."""

    @pytest.fixture
    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        cuda = FakeCuda()

        def make_late(slots: int, slot_bytes: int, device: torch.device, buffers: int) -> DeviceArena:
            return LateArena(slots, slot_bytes, buffers, cuda)

        monkeypatch.setattr(setup, "DeviceArena", make_late)
        monkeypatch.setattr(cache_module, "resolve_device", lambda device: torch.device("cuda", 0))
        return cuda

    def test_a_background_copy_has_a_stream_of_its_own_which_a_hit_waits_for(self, tmp_path: Path, cuda: FakeCuda):
        source, seen = write_experts(tmp_path / "x.bin"), []
        with ExpertCache(slots=2, threads=4) as mine:
            mine.bind(source, "cuda")
            mine.prefetch(source, 0, [3])
            arrived(mine, 1)
            assert len(cuda.streams) == 2
            assert not cuda.streams[0].queue
            with mine.lease(source, 0, [3]) as lease:
                row = lease.views("gate")[lease.slots[0]]
                cuda.streams[0].queue.append(lambda: seen.append(row.numpy().tobytes()))
            cuda.streams[0].synchronize()
        assert seen == [wanted(source, 0, [3])[0]["gate"]]

    def test_a_background_copy_waits_for_work_that_still_reads_the_slot(self, tmp_path: Path, cuda: FakeCuda):
        source, seen = write_experts(tmp_path / "x.bin"), []
        with ExpertCache(slots=1, threads=4) as mine:
            mine.bind(source, "cuda")
            with mine.lease(source, 0, [4]) as lease:
                row = lease.views("gate")[0]
                cuda.streams[0].queue.append(lambda: seen.append(row.numpy().tobytes()))
            mine.prefetch(source, 0, [5])
            arrived(mine, 1)
            cuda.streams[1].synchronize()  # the copy runs as early as it may
            cuda.synchronize()
            assert seen == [wanted(source, 0, [4])[0]["gate"]]
            with mine.lease(source, 0, [5]) as lease:
                cuda.synchronize()
                assert held(lease) == wanted(source, 0, [5])

    def test_buffers_are_left_for_demand(self, tmp_path: Path, cuda: FakeCuda, disk: Disk):
        source = write_experts(tmp_path / "x.bin", read_call=disk, experts=20)
        disk.open.clear()
        with ExpertCache(slots=20, threads=2) as mine:
            mine.bind(source, "cuda")
            assert len(mine.prefetch(source, 0, range(10))) == 1  # half of two threads
            threading.Timer(0.05, disk.open.set).start()
            with mine.lease(source, 0, range(10, 20)) as lease:
                cuda.synchronize()
                assert held(lease) == wanted(source, 0, range(10, 20))

    def test_one_left_by_its_holder_before_the_copy_still_arrives(self, tmp_path: Path, cuda: FakeCuda, disk: Disk):
        source = write_experts(tmp_path / "x.bin", read_call=disk)
        disk.open.clear()
        with ExpertCache(slots=3, threads=2) as mine:
            mine.bind(source, "cuda")
            mine.prefetch(source, 0, [3])
            failed: list[Exception] = []

            def impatient() -> None:
                try:
                    mine.lease(source, 0, [3, 99])
                except Exception as error:
                    failed.append(error)

            impatient()
            disk.open.set()
            arrived(mine, 1)
            assert "no expert 99" in str(failed[0])
            with mine.lease(source, 0, [3]) as lease:
                cuda.synchronize()
                assert held(lease) == wanted(source, 0, [3])


def test_prefetches_are_checked_like_requests(source: ExpertSource):
    with bound(source, slots=2) as cache:
        with pytest.raises(LabError, match="no expert 8"):
            cache.prefetch(source, 0, [1, 8])
        with pytest.raises(LabError, match="no MoE layer 9"):
            cache.prefetch(source, 9, [1])
        assert cache.prefetch(source, 0, []) == []
        usable(cache, source)


def test_whole_expert_jobs_of_a_deep_queue_bring_the_same_bytes(tmp_path: Path):
    """More misses than twice the threads: one job an expert."""
    jobs: list[tuple[int, int]] = []

    def counted(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        jobs.append((threading.get_ident(), offset))
        return os.preadv(fd, buffers, offset)

    shapes = ((300, 1024),) * 3  # f32: 1.2 MB a part, so that several jobs would be worth it
    source = write_experts(tmp_path / "x.bin", layers=[0], experts=6, shapes=lambda _: shapes, read_call=counted)
    size = source.parts(0)[0].nbytes
    with bound(source, slots=6, threads=2) as cache, cache.lease(source, 0, range(6)) as lease:
        for expert in range(6):
            assert held(lease)[expert]["down"] == expert_bytes(0, expert, "down", size)
            readers = {thread for thread, at in jobs if any(s.file_offset == at for s in source.segments(0, expert))}
            assert len(readers) == 1
