"""Memory that cannot be had, slots that nobody owns, errors that say whose they are: rows of the streaming failures."""

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_lab.errors import LabError
from moe_lab.stream import arena, memory, room, setup
from moe_lab.stream import cache as cache_module
from moe_lab.stream.arena import DeviceArena, PackingHostArena
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.events import EventLog, Kind
from moe_lab.stream.memory import host_block
from moe_lab.stream.source import ExpertSource
from tests.support.expert_files import held, wanted, write_experts
from tests.support.fake_cuda import FakeCuda, LateArena
from tests.support.faulty_disk import Disk, usable

BUFFERS = 6


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def source(tmp_path: Path, disk: Disk) -> ExpertSource:
    return write_experts(tmp_path / "x.bin", read_call=disk)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A pretended GPU under every cache bound to "cuda"."""
    cuda = FakeCuda()

    def make(slots: int, slot_bytes: int, device: torch.device, buffers: int) -> DeviceArena:
        return LateArena(slots, slot_bytes, BUFFERS, cuda)

    monkeypatch.setattr(setup, "DeviceArena", make)
    monkeypatch.setattr(
        cache_module,
        "resolve_device",
        lambda device: torch.device("cuda", 0) if device == "cuda" else torch.device(device),
    )
    return cuda


class Refusing:
    """`host_block` whose calls number `refused` fail; counts from 1."""

    def __init__(self, refused: Callable[[int], bool]) -> None:
        self.calls, self.refused = 0, refused

    def __call__(self, nbytes: int) -> torch.Tensor:
        self.calls += 1
        if self.refused(self.calls):
            raise MemoryError("made up")
        return host_block(nbytes)


def told(work: Callable[[], object]) -> list[str]:
    """What `work` warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    assert all(w.category is RuntimeWarning for w in caught)
    return [str(w.message) for w in caught]


class TestShrinking:
    @pytest.mark.parametrize(("fits", "got"), [(8, 8), (7, 4), (3, 2), (1, 1)], ids="room-for-{}".format)
    def test_slots_are_halved_until_they_fit_with_one_warning(
        self, source: ExpertSource, monkeypatch: pytest.MonkeyPatch, fits: int, got: int
    ):
        size = source.slot_bytes
        monkeypatch.setattr(arena, "available_host_bytes", lambda: fits * size)
        with ExpertCache(slots=8) as cache:
            messages = told(lambda: cache.bind(source, "cpu"))
            assert messages == [
                f"the expert cache wanted slots=8 ({8 * size:,} bytes) and got slots={got} ({got * size:,} bytes): "
                f"only {fits * size:,} bytes of host memory are free."
            ] * (got < 8)
            assert cache.slots == got
            assert cache.memory is not None
            assert (cache.memory.slots, cache.memory.arena_bytes) == (got, got * size)
            usable(cache, source)

    def test_the_warning_points_at_the_callers_line(self, source: ExpertSource, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(arena, "available_host_bytes", lambda: 3 * source.slot_bytes)
        with ExpertCache(slots=8) as cache, pytest.warns(RuntimeWarning, match="got slots=2") as caught:
            cache.bind(source, "cpu")
        assert caught[0].filename == __file__

    def test_a_size_in_gib_shrinks_as_well(self, source: ExpertSource, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(arena, "available_host_bytes", lambda: 3 * source.slot_bytes)
        with ExpertCache(gib=12.5 * source.slot_bytes / 2**30) as cache:
            assert len(told(lambda: cache.bind(source, "cpu"))) == 1
            assert cache.slots == 3  # 12, 6, 3
            usable(cache, source)

    @pytest.mark.parametrize(("per_layer", "least"), [(False, 1), (True, 2)], ids=["together", "per-layer"])
    def test_below_the_least_it_is_refused_and_can_be_bound_later(
        self, source: ExpertSource, monkeypatch: pytest.MonkeyPatch, per_layer: bool, least: int
    ):
        size = source.slot_bytes
        with ExpertCache(slots=5, per_layer=per_layer) as cache:
            with monkeypatch.context() as patch:
                patch.setattr(arena, "available_host_bytes", lambda: least * size - 1)
                refused = rf"slots=5 .* wants {5 * size:,} bytes, .* are free, and the least, slots={least}, does not"
                with pytest.raises(LabError, match=refused):
                    cache.bind(source, "cpu")
            assert cache.slots == 5
            cache.bind(source, "cpu")
            assert cache.slots == 5
            usable(cache, source)

    def test_a_device_shrinks_to_its_free_memory(self, source: ExpertSource, cuda: FakeCuda):
        cuda.free_bytes = 5 * source.slot_bytes
        with ExpertCache(slots=16) as cache:
            (message,) = told(lambda: cache.bind(source, "cuda"))
            assert "wanted slots=16" in message
            assert "got slots=4" in message
            with cache.lease(source, 1, [3, 7]) as lease:
                cuda.synchronize()
                assert held(lease) == wanted(source, 1, [3, 7])


class TestAllocators:
    @pytest.mark.parametrize("fails", range(5), ids="first-{}-fail".format)
    def test_an_allocator_that_refuses_again_and_again(
        self, source: ExpertSource, monkeypatch: pytest.MonkeyPatch, fails: int
    ):
        allocator = Refusing(lambda call: call <= fails)
        monkeypatch.setattr(room, "host_block", allocator)
        with ExpertCache(slots=8) as cache:
            if fails == 4:
                with pytest.raises(LabError, match=r"slots=8 .*cpu refused it, and the least, slots=1, does not fit"):
                    cache.bind(source, "cpu")
                cache.bind(source, "cpu")
                assert cache.slots == 8
            else:
                assert len(told(lambda: cache.bind(source, "cpu"))) == (fails > 0)
                assert cache.slots == 8 >> fails
            usable(cache, source)

    @pytest.mark.parametrize("nth", range(1, 6), ids="call{}".format)
    def test_an_arena_of_a_device_takes_all_or_nothing(self, monkeypatch: pytest.MonkeyPatch, nth: int):
        """Slots, two raw rows, and the ring: of each a refusal is a LabError and leaves nothing locked."""
        cuda, allocator = FakeCuda(), Refusing(lambda call: call == nth)
        monkeypatch.setattr(room, "host_block", allocator)
        monkeypatch.setattr(memory, "host_block", allocator)
        if nth == 5:
            assert LateArena(2, 8192, 3, cuda, 4096).buffers == 3
            assert allocator.calls == 4
            return
        with pytest.raises(LabError, match="refused it"):
            LateArena(2, 8192, 3, cuda, 4096)
        gc.collect()
        assert cuda.runtime.locked == {}

    @pytest.mark.parametrize("nth", [1, 2], ids=["slots", "buffers"])
    def test_an_arena_that_packs_says_what_it_wanted(self, monkeypatch: pytest.MonkeyPatch, nth: int):
        monkeypatch.setattr(room, "host_block", Refusing(lambda call: call == nth))
        with pytest.raises(LabError, match=r"slots=2 x 8,192 bytes wants .* cpu refused it"):
            PackingHostArena(2, 8192, 4096, 3)

    def test_buffers_count_in_what_has_to_be_free(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(arena, "available_host_bytes", lambda: 2 * 8192 + 3 * 4096 - 1)
        with pytest.raises(LabError, match="wants 28,672 bytes, but only 28,671"):
            PackingHostArena(2, 8192, 4096, 3)


class TestLockedLimit:
    def test_a_ring_shrinks_to_what_may_be_locked(
        self, source: ExpertSource, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(memory, "locked_limit_bytes", lambda: 16_384)
        cuda.runtime.most = 16_384
        with ExpertCache(slots=4, threads=4) as cache:
            messages = told(lambda: cache.bind(source, "cuda"))
            assert messages == [
                "page-locking 24,576 bytes failed (CUDA error 2), where `ulimit -l` allows 16,384; 3 of the 6 buffers "
                "are page-locked, 12,288 bytes; fewer reads can be under way."
            ]
            assert cache.memory is not None
            assert cache.memory.locked_bytes == sum(cuda.runtime.locked.values()) == 12_288
            for wave in cache.waves(range(8)):
                with cache.lease(source, 0, wave) as lease:
                    cuda.synchronize()
                    assert held(lease) == wanted(source, 0, wave)
        assert cuda.runtime.locked == {}

    def test_below_two_buffers_all_are_ordinary_memory(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(memory, "locked_limit_bytes", lambda: None)
        cuda.runtime.most = 4096
        made: list[DeviceArena] = []
        messages = told(lambda: made.append(LateArena(1, 100, BUFFERS, cuda)))
        assert messages == ["page-locking 24,576 bytes failed (CUDA error 2); copies to the GPU will be slower."]
        assert (made[0].buffers, made[0].locked_bytes) == (BUFFERS, 0)

    def test_no_memory_for_the_ring_is_said_before_it_is_taken(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(room, "available_host_bytes", lambda: 1000)
        with pytest.raises(LabError, match=r"6 buffers x 4,096 bytes of host memory, but only 1,000 .*Lower threads"):
            LateArena(1, 100, BUFFERS, cuda)

    def test_the_systems_own_limit_is_read(self):
        soft = memory.locked_limit_bytes()
        (line,) = (s for s in Path("/proc/self/limits").read_text().splitlines() if s.startswith("Max locked memory"))
        assert line.split()[3] == ("unlimited" if soft is None else str(soft))


class TestPoison:
    """A view that outlives its lease is an error; poisoned, the slot says so as soon as somebody else owns it."""

    def test_a_use_after_the_slot_was_given_on_is_seen(self, source: ExpertSource, disk: Disk):
        for poison in (True, False):
            with ExpertCache(slots=1, threads=1, poison=poison) as cache:
                cache.bind(source, "cpu")
                with cache.lease(source, 0, [3]) as lease:
                    stale = lease.views("gate")[int(lease.slots[0])]
                    before = stale.clone()
                assert torch.equal(stale, before)  # resident still: a later request finds it
                disk.errors = [5, 5]  # what takes its place does not come
                with pytest.raises(LabError):
                    cache.lease(source, 0, [4])
                values = stale.numpy().copy().view(np.float32)
                assert bool(np.isnan(values).all()) == poison
                assert torch.equal(stale, before) != poison  # without it, the old expert: plausible and wrong
                usable(cache, source)

    def test_a_slot_is_poisoned_while_the_next_expert_is_still_read(self, source: ExpertSource, disk: Disk):
        with ExpertCache(slots=1, threads=1, poison=True) as cache:
            cache.bind(source, "cpu")
            assert cache._arena is not None
            assert bool((cache._arena.tensor == 0xFF).all())
            with cache.lease(source, 0, [3]) as lease:
                stale = lease.views("down")[0]
            disk.open.clear()
            second = cache.lease(source, 0, [4], wait=False)
            assert bool((stale == 0xFF).all())
            disk.open.set()
            second.wait()
            assert held(second) == wanted(source, 0, [4])
            second.release()

    def test_on_a_device_behind_the_work_that_reads_it_and_before_the_copy(self, source: ExpertSource, cuda: FakeCuda):
        seen: list[bool] = []
        with ExpertCache(slots=1, threads=1, poison=True) as cache:
            cache.bind(source, "cuda")
            with cache.lease(source, 0, [3]) as lease:
                view, right = lease.views("gate")[0], wanted(source, 0, [3])[0]["gate"]
                cuda.current.queue.append(lambda: seen.append(view.numpy().tobytes() == right))  # a kernel, late
            with cache.lease(source, 0, [4]) as lease:
                cuda.synchronize()
                assert held(lease) == wanted(source, 0, [4])
            assert seen == [True]
            part = cache._partitions[0]
            assert cache._arena is not None
            part.table.take([(1, 5)])
            part._place((1, 5), set(), ahead=False)
            cuda.synchronize()
            assert bool((view == 0xFF).all())


@pytest.mark.parametrize("logged", [False, True], ids=["unlogged", "logged"])
def test_an_error_carries_layer_expert_and_the_number_of_its_request(source: ExpertSource, disk: Disk, logged: bool):
    log = EventLog()
    with ExpertCache(slots=2, threads=1) as cache:
        cache.bind(source, "cpu")
        cache.record(log if logged else None)
        numbers = []
        for _ in range(2):
            disk.errors = [5, 5]
            with pytest.raises(LabError, match=r"request \d+: layer 1 expert 6: .*Input/output error") as caught:
                cache.lease(source, 1, [6])
            numbers.append(int(str(caught.value).split("request ")[1].split(":")[0]))
        assert numbers[0] < numbers[1]
        if logged:
            events: Any = log.table()
            assert events["request"][events["kind"] == Kind.ASKED].tolist() == numbers
        cache.record(None)
        usable(cache, source)
