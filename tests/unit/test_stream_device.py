"""The device arena's order of events, on a pretended GPU whose streams run as late as they may."""

import errno
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab.stream import cache, setup
from moe_lab.stream.arena import DeviceArena, Stage
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.lease import Lease
from moe_lab.stream.streams import running_on
from tests.support.expert_files import held, wanted, write_experts
from tests.support.fake_cuda import FakeCuda, LateArena
from tests.support.faulty_disk import Disk, until

BYTES = 256


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


def make(cuda: FakeCuda, slots: int = 2, buffers: int = 2) -> LateArena:
    return LateArena(slots, BYTES, buffers, cuda)


def fill(arena: LateArena, slot: int, value: int) -> Stage:
    """What a reader and a holder do: fill a buffer once it may be written, queue its copy, give it back."""
    stage = arena.stage(slot)
    assert stage is not None
    stage.wait_writable()
    stage.view[:] = bytes([value]) * BYTES
    arena.publish(slot, stage, BYTES)
    arena.recycle(stage)
    return stage


class Kernel:
    """Work that reads a slot when its turn comes."""

    def __init__(self, arena: LateArena, slot: int) -> None:
        self.arena, self.slot, self.saw = arena, slot, -1

    def __call__(self) -> None:
        row = self.arena.tensor[self.slot]
        assert bool((row == row[0]).all())
        self.saw = int(row[0])


def test_a_buffer_is_refilled_only_after_its_copy(cuda: FakeCuda):
    slots = make(cuda, slots=100, buffers=2)
    for value in range(100):
        fill(slots, value, value)
    cuda.synchronize()
    assert slots.tensor[:, 0].tolist() == list(range(100))


def test_a_slot_is_overwritten_only_after_work_on_another_stream(cuda: FakeCuda):
    slots, side = make(cuda), cuda.new_stream()
    fill(slots, 0, 7)
    kernel = Kernel(slots, 0)
    with cuda.stream(side):
        slots.enter([0])
        side.queue.append(kernel)
        slots.leave([0])
    fill(slots, 0, 8)
    cuda.streams[0].synchronize()  # the main stream runs first, as far as it may
    side.synchronize()
    assert kernel.saw == 7


def test_two_readers_on_two_streams_are_both_waited_for(cuda: FakeCuda):
    slots, sides = make(cuda), [cuda.new_stream(), cuda.new_stream()]
    fill(slots, 0, 7)
    kernels = [Kernel(slots, 0) for _ in sides]
    for side, kernel in zip(sides, kernels, strict=True):
        with cuda.stream(side):
            slots.enter([0])
            side.queue.append(kernel)
            slots.leave([0])
    fill(slots, 0, 8)
    cuda.synchronize()
    assert [kernel.saw for kernel in kernels] == [7, 7]


def test_bytes_copied_by_one_stream_are_waited_for_by_another(cuda: FakeCuda):
    slots, side = make(cuda), cuda.new_stream()
    fill(slots, 0, 7)
    kernel = Kernel(slots, 0)
    with cuda.stream(side):
        slots.enter([0])
        side.queue.append(kernel)
    side.synchronize()  # before the stream that copies
    assert kernel.saw == 7


def test_a_copy_waits_for_an_older_copy_into_the_same_slot(cuda: FakeCuda):
    slots, side = make(cuda), cuda.new_stream()
    fill(slots, 0, 7)
    with cuda.stream(side):
        fill(slots, 0, 8)
    side.synchronize()
    cuda.synchronize()
    assert slots.tensor[0, 0] == 8


def test_what_has_arrived_is_waited_for_no_more(cuda: FakeCuda):
    slots = make(cuda)
    fill(slots, 0, 7)
    assert not slots.arrived(0)
    slots.enter([0])
    assert len(cuda.streams[0].queue) == 1
    cuda.synchronize()
    assert slots.arrived(0)
    slots.enter([0])
    assert not cuda.streams[0].queue


def test_copies_on_demand_and_ahead_of_it_do_not_stand_behind_each_other(cuda: FakeCuda):
    slots = make(cuda)
    for slot, ahead in ((0, True), (1, False)):
        stage = slots.stage(slot)
        assert stage is not None
        stage.view[:] = bytes([slot + 1]) * BYTES
        slots.publish(slot, stage, BYTES, ahead=ahead)
    assert len(cuda.streams) == 3
    cuda.streams[2].synchronize()
    assert (slots.tensor[1, 0], slots.arrived(1), slots.arrived(0)) == (2, True, False)
    cuda.synchronize()


def test_an_interrupted_copy_is_waited_for_before_its_buffer_is_lost(cuda: FakeCuda):
    class Torn(LateArena):
        def _copy(self, *args) -> None:
            super()._copy(*args)
            raise KeyboardInterrupt

    slots = Torn(1, BYTES, 1, cuda)
    stage = slots.stage(0)
    assert stage is not None
    stage.view[:] = b"\7" * BYTES
    with pytest.raises(KeyboardInterrupt):
        slots.publish(0, stage, BYTES)
    assert not cuda.streams[1].queue
    slots.reclaim(())
    assert slots.stage(0) is stage


def test_no_buffer_is_free_while_all_are_in_use(cuda: FakeCuda):
    slots = make(cuda, buffers=1)
    stages = []
    while (stage := slots.stage(0)) is not None:
        stages.append(stage)
    assert len(stages) == len(slots.stages.every) >= 1
    slots.recycle(stages[0])
    slots.recycle(stages[0])
    assert slots.stage(0) is stages[0]
    assert slots.stage(0) is None


@pytest.mark.parametrize(
    ("slot_bytes", "buffers", "locked"), [(256, 2, 8192), (4097, 3, 24576), (5 << 20, 5, 25 << 20)]
)
def test_s10_the_ring_locks_whole_pages_of_its_buffers_and_no_more(slot_bytes: int, buffers: int, locked: int):
    cuda = FakeCuda()
    ring = LateArena(1, slot_bytes, buffers, cuda)
    assert ring.locked_bytes == sum(cuda.runtime.locked.values()) == locked
    stages = [ring.stage(0) for _ in range(buffers)]
    assert all(stage is not None and stage.view.nbytes == slot_bytes for stage in stages)
    assert all(stage.tensor.data_ptr() % 4096 == 0 for stage in stages)  # direct reads may go there
    assert ring.stage(0) is None
    ring.drop()
    assert cuda.runtime.locked == {}


def test_a_dropped_ring_is_unlocked_before_its_memory_goes_back(cuda: FakeCuda):
    ring = make(cuda)
    assert cuda.runtime.locked
    del ring
    assert cuda.runtime.locked == {}


def test_failed_page_locking_warns_once_and_goes_on(cuda: FakeCuda):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cuda.runtime.code = 2
        slots = make(cuda)
        for value in range(5):
            fill(slots, 0, value)
    cuda.synchronize()
    assert [w.category for w in caught] == [RuntimeWarning]
    assert "page-locking 8,192 bytes failed (CUDA error 2)" in str(caught[0].message)
    assert slots.locked_bytes == 0
    assert slots.tensor[0, 0] == 4


def test_device_memory_is_checked_first():
    with pytest.raises(LabError, match="wants 2,560 bytes, but only 100 bytes of memory on cpu are free"):
        make(FakeCuda(free_bytes=100), slots=10)


class TestWholeCache:
    """ExpertCache over the pretended GPU, with real reader threads."""

    @pytest.fixture
    def on_fake_gpu(self, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> FakeCuda:
        def make_late(slots: int, slot_bytes: int, device: torch.device, buffers: int) -> DeviceArena:
            return LateArena(slots, slot_bytes, 2, cuda)

        monkeypatch.setattr(setup, "DeviceArena", make_late)
        monkeypatch.setattr(setup, "HostArena", None)
        monkeypatch.setattr(cache, "resolve_device", lambda device: torch.device("cuda", 0))
        return cuda

    @pytest.mark.parametrize("slots", [1, 3, 8], ids="slots{}".format)
    def test_every_wave_shows_the_files_bytes(self, tmp_path: Path, on_fake_gpu: FakeCuda, slots: int):
        source = write_experts(tmp_path / "x.bin")
        with ExpertCache(slots=slots) as mine:
            mine.bind(source, "cuda")
            for experts in ([0, 1, 2], [7, 1], [3, 4, 5, 6, 0]):
                for wave in mine.waves(experts):
                    with mine.lease(source, 1, wave) as lease:
                        on_fake_gpu.synchronize()
                        assert held(lease) == wanted(source, 1, wave)
            assert mine.hits + mine.misses == 10

    def test_more_misses_at_once_than_buffers(self, tmp_path: Path, on_fake_gpu: FakeCuda):
        source = write_experts(tmp_path / "x.bin", experts=40)
        with ExpertCache(slots=40) as mine:
            mine.bind(source, "cuda")
            with mine.lease(source, 0, range(40)) as lease:
                on_fake_gpu.synchronize()
                assert held(lease) == wanted(source, 0, range(40))

    def test_work_of_an_ended_lease_on_another_stream_is_waited_for(self, tmp_path: Path, on_fake_gpu: FakeCuda):
        source, side, seen = write_experts(tmp_path / "x.bin"), on_fake_gpu.new_stream(), []
        with ExpertCache(slots=1) as mine:
            mine.bind(source, "cuda")
            with on_fake_gpu.stream(side), mine.lease(source, 0, [3]) as lease:
                row = lease.views("gate")[0]
                side.queue.append(lambda: seen.append(row.numpy().tobytes()))
            mine.lease(source, 0, [4]).release()
            on_fake_gpu.synchronize()
        assert seen == [wanted(source, 0, [3])[0]["gate"]]

    def test_a_hit_on_another_stream_waits_for_its_copy(self, tmp_path: Path, on_fake_gpu: FakeCuda):
        source, side, seen = write_experts(tmp_path / "x.bin"), on_fake_gpu.new_stream(), []
        with ExpertCache(slots=1) as mine:
            mine.bind(source, "cuda")
            mine.lease(source, 0, [3]).release()
            with on_fake_gpu.stream(side), mine.lease(source, 0, [3]) as lease:
                row = lease.views("gate")[0]
                side.queue.append(lambda: seen.append(row.numpy().tobytes()))
            side.synchronize()
        assert seen == [wanted(source, 0, [3])[0]["gate"]]

    def test_the_second_phase_alone_waits_for_copies_and_a_failed_one_leaves_the_first_ones_slots_in_order(
        self, tmp_path: Path, on_fake_gpu: FakeCuda
    ):
        disk, seen, main = Disk(), [], on_fake_gpu.streams[0]
        source = write_experts(tmp_path / "x.bin", read_call=disk)

        def kernel(lease: Lease, place: int) -> None:
            row = lease.views("gate")[lease.slots[place]]
            main.queue.append(lambda: seen.append(row.numpy().tobytes()))

        gate = {e: wanted(source, 0, [e])[0]["gate"] for e in range(8)}
        with ExpertCache(slots=2) as mine:
            mine.bind(source, "cuda")
            mine.lease(source, 0, [1]).release()
            on_fake_gpu.synchronize()
            with mine.lease(source, 0, [1, 2], wait=False) as lease:
                assert lease.awaited == {2}
                until(lambda: not lease.blocked)
                kernel(lease, 0)
                main.synchronize()
                assert seen == [gate[1]]
                assert any(stream.queue for stream in on_fake_gpu.streams[1:]), "the copy has not run yet"
                lease.wait()
                kernel(lease, 1)
                main.synchronize()
                assert seen == [gate[1], gate[2]]
            disk.errors = [errno.EIO] * 20
            lease = mine.lease(source, 0, [2, 5], wait=False)
            kernel(lease, 0)  # queued, and runs late
            with pytest.raises(LabError, match="layer 0 expert 5"):
                lease.wait()
            disk.errors = []
            with mine.lease(source, 0, [6, 7]) as again:  # takes the slot that the kernel still reads
                on_fake_gpu.streams[1].synchronize()  # its copies run as early as they may
                main.synchronize()
                assert seen[2] == gate[2]
                assert held(again) == wanted(source, 0, [6, 7])

    def test_an_interrupt_loses_no_buffer(self, tmp_path: Path, on_fake_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch):
        source, stage = write_experts(tmp_path / "x.bin"), LateArena.stage

        def taken_then_interrupted(self, slot: int) -> None:
            stage(self, slot)
            raise KeyboardInterrupt

        with ExpertCache(slots=2) as mine:
            mine.bind(source, "cuda")
            with monkeypatch.context() as patch:
                patch.setattr(LateArena, "stage", taken_then_interrupted)
                for _ in range(20):
                    with pytest.raises(KeyboardInterrupt):
                        mine.lease(source, 0, [1, 2])
            with mine.lease(source, 0, [1, 2]) as lease:
                on_fake_gpu.synchronize()
                assert held(lease) == wanted(source, 0, [1, 2])

    def test_callers_that_share_two_buffers_do_not_block_each_other(self, tmp_path: Path, on_fake_gpu: FakeCuda):
        source = write_experts(tmp_path / "x.bin", experts=40)
        failures: list[BaseException] = []
        with ExpertCache(slots=12) as mine:
            mine.bind(source, "cuda")

            def work(seed: int) -> None:
                rng = torch.Generator().manual_seed(seed)
                try:
                    for _ in range(40):
                        mine.lease(source, 0, torch.randperm(40, generator=rng)[:3].tolist(), timeout_s=20).release()
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert not any(thread.is_alive() for thread in threads)
        assert not failures


def test_a_stand_ins_stream_is_made_current_by_its_own_context(cuda: FakeCuda):
    side = cuda.new_stream()
    with running_on(side, cuda):
        assert cuda.current is side
    assert cuda.current is cuda.streams[0]


@pytest.mark.parametrize("here", [0, 1], ids=["streams-device", "other-device"])
def test_torchs_streams_are_set_directly_on_their_own_device_and_by_torch_elsewhere(
    monkeypatch: pytest.MonkeyPatch, here: int
):
    told: list[object] = []

    class Stream:
        stream_id, device_index, device_type = 7, 0, 1

    @contextmanager
    def torchs(stream: object):
        told.append("torch")
        yield

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: here, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda device: (3, device, 1), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setStream", lambda **to: told.append(tuple(to.values())), raising=False)
    monkeypatch.setattr(torch.cuda, "stream", torchs)
    with pytest.raises(ZeroDivisionError), running_on(Stream()):
        _ = 1 // 0
    assert told == ([(7, 0, 1), (3, 0, 1)] if here == 0 else ["torch"])
