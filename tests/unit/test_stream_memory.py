"""Host memory in exact sizes, locked or not, and experts that live in it."""

import gc
from pathlib import Path

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab.stream import cache as cache_module
from moe_lab.stream import direct, memory, memory_source, setup
from moe_lab.stream.arena import DeviceArena
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.faults import FaultyReads
from moe_lab.stream.memory import LockedBlock, copy_bytes, host_block
from moe_lab.stream.memory_source import MemorySource
from moe_lab.stream.source import ExpertSource
from moe_lab.tolerances import tol
from tests.support.expert_files import held, wanted, write_experts
from tests.support.fake_cuda import FakeCuda, LateArena
from tests.support.faulty_disk import bound, usable


@pytest.fixture
def source(tmp_path: Path) -> ExpertSource:
    shapes = {0: ((3, 5), (3, 5), (5, 7)), 1: ((40, 50), (40, 50), (50, 40))}
    return write_experts(tmp_path / "x.bin", shapes=shapes.__getitem__)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class TestBlocks:
    @pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 9 << 20], ids=str)
    def test_a_block_has_its_size_begins_at_a_page_and_is_zero(self, nbytes: int):
        block = host_block(nbytes)
        assert block.shape == (nbytes,)
        assert block.data_ptr() % 4096 == 0
        assert not block.any()
        assert nbytes < 8 << 20 or block.data_ptr() % memory.HUGE_PAGE_BYTES == 0

    def test_views_keep_the_memory_and_the_last_gives_it_back(self):
        gc.collect()
        before = resident_bytes()
        block = host_block(64 << 20)
        block.fill_(7)
        part = block[-5:]
        del block
        assert part.tolist() == [7] * 5
        assert resident_bytes() - before > 60 << 20
        del part
        gc.collect()
        assert resident_bytes() - before < 8 << 20

    def test_a_cache_takes_the_memory_its_plan_says(self, tmp_path: Path):
        shapes = ((512, 1024), (512, 1024), (1024, 512))  # f32: 6 MB an expert
        big = write_experts(tmp_path / "big.bin", layers=[0], experts=12, shapes=lambda _: shapes)
        ExpertCache(slots=1).bind(big, "cpu")  # what Python takes once for all caches
        gc.collect()
        before = resident_bytes()
        with bound(big, slots=12) as cache:
            cache.lease(big, 0, range(12)).release()
            grown = resident_bytes() - before
            assert cache.memory is not None
            assert cache.memory.arena_bytes == 12 * 3 * 512 * 1024 * 4
            assert cache.memory.scratch_bytes == (4 * direct.SCRATCH_BYTES if cache.io_mode == "direct" else 0)
            assert abs(grown - cache.memory.host_bytes) <= tol("stream/memory plan") * cache.memory.host_bytes

    @pytest.mark.parametrize("nbytes", [0, 10, memory.SMALL_COPY_BYTES, memory.SMALL_COPY_BYTES + 1])
    def test_copies_are_whole(self, nbytes: int):
        source, to = memoryview(bytes(range(256)) * 80)[:nbytes], memoryview(bytearray(nbytes))
        copy_bytes(to, source)
        assert to == source


class TestLocking:
    def test_s10_exactly_the_pages_are_locked_and_unlocked_once(self):
        cuda = FakeCuda()
        block = LockedBlock(36_000_001, cuda)
        assert block.locked_bytes == sum(cuda.runtime.locked.values()) == 36_003_840  # a power of two would be 67 MB
        block.close()
        block.close()
        assert cuda.runtime.locked == {}
        assert block.locked_bytes == 0

    def test_a_forgotten_block_is_unlocked(self):
        cuda = FakeCuda()
        block = LockedBlock(5000, cuda)
        del block
        gc.collect()
        assert cuda.runtime.locked == {}

    def test_s11_refused_locking_is_one_warning_and_ordinary_memory(self):
        cuda = FakeCuda()
        cuda.runtime.code = 2
        with pytest.warns(RuntimeWarning, match=r"page-locking 5,000 bytes failed \(CUDA error 2\)") as caught:
            block = LockedBlock(5000, cuda)
        assert len(caught) == 1
        assert (block.locked, block.locked_bytes, block.tensor.numel()) == (False, 0, 5000)

    def test_without_cuda_it_says_so(self):
        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
        with pytest.warns(RuntimeWarning, match="page-locking .* failed"):
            assert not LockedBlock(10).locked


class TestMemorySource:
    def test_the_same_experts_without_a_file(self, source: ExpertSource):
        kept = MemorySource(source)
        source.path.unlink()
        for slots in (1, 3, 16):
            with bound(kept, slots=slots) as cache:
                usable(cache, kept)
                assert cache.io_mode == "memory"
                assert cache.bytes_read == 8 * (source.expert_nbytes(0) + source.expert_nbytes(1))

    def test_it_takes_whole_pages_an_expert_and_says_how_many(self, source: ExpertSource):
        kept = MemorySource(source)
        assert kept.memory_bytes == 8 * 4096 + 8 * -(-source.span_bytes(1) // 4096) * 4096
        assert kept.locked_bytes == 0
        assert kept.slot_bytes % 4096 == 0

    def test_some_layers_alone(self, source: ExpertSource):
        kept = MemorySource(source, [1])
        assert kept.layers == (1,)
        with bound(kept, slots=2) as cache:
            usable(cache, kept)
            with pytest.raises(LabError, match="no MoE layer 0"):
                cache.lease(kept, 0, [1])

    def test_it_is_no_other_source(self, source: ExpertSource):
        kept = MemorySource(source)
        assert kept.same_as(kept)
        assert not kept.same_as(MemorySource(source))
        assert not kept.same_as(source)
        with bound(kept, slots=2) as cache, pytest.raises(LabError, match="second cache"):
            cache.bind(source, "cpu")

    def test_faults_belong_to_the_file_behind_it(self, source: ExpertSource):
        with pytest.raises(LabError, match="not read by a system call"):
            MemorySource(source).reading_through(FaultyReads())

    def test_more_than_there_is_is_refused_first(self, source: ExpertSource, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(memory_source, "available_host_bytes", lambda: 1000)
        with pytest.raises(LabError, match="of host memory, 1,000 are free"):
            MemorySource(source)

    @pytest.mark.parametrize("locked", [True, False], ids=["locked", "not-locked"])
    def test_a_gpu_copies_from_locked_rows_and_reads_the_others(
        self, source: ExpertSource, locked: bool, monkeypatch: pytest.MonkeyPatch
    ):
        cuda, filled = FakeCuda(), []

        class Watched(LateArena):
            def stage(self, slot: int):
                filled.append(slot)
                return super().stage(slot)

        def make_late(slots: int, slot_bytes: int, device: torch.device, buffers: int) -> DeviceArena:
            return Watched(slots, slot_bytes, buffers, cuda)

        monkeypatch.setattr(setup, "DeviceArena", make_late)
        monkeypatch.setattr(cache_module, "resolve_device", lambda device: torch.device("cuda", 0))
        kept = MemorySource(source, locked=locked, cuda=cuda)
        assert kept.locked_bytes == (kept.memory_bytes if locked else 0)
        with ExpertCache(slots=3) as cache:
            cache.bind(kept, "cuda")
            for layer in (0, 1):
                for wave in cache.waves([6, 1, 3, 5, 0]):
                    with cache.lease(kept, layer, wave) as lease:
                        cuda.synchronize()
                        assert held(lease) == wanted(source, layer, wave)
            assert cache.misses == 10
            free = len(cache._arena.stages.free)  # type: ignore[union-attr]
            assert free == len(cache._arena.stages.every)  # type: ignore[union-attr]
        assert bool(filled) != locked
