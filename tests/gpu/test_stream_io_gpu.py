"""Page-locked sources, exact locked memory and background reads on a GPU."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.calibrate import calibrate_copies
from moe_lab.stream.memory import LockedBlock
from moe_lab.stream.memory_source import MemorySource
from moe_lab.stream.pack import pack
from moe_lab.stream.packed import PackedSource
from moe_lab.stream.source import ExpertSource
from moe_lab.stream.streams import running_on
from moe_lab.tolerances import tol

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LONG_CYCLES = 50_000_000  # about 30 ms of a GPU at 1.7 GHz
ROWS, COLUMNS, EXPERTS = 1024, 683, 48  # three f32 parts: 8.4 MB an expert


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> ExpertSource:
    """Every byte of expert e is e."""
    path = tmp_path_factory.mktemp("experts") / "big.bin"
    nbytes, shape = ROWS * COLUMNS * 4, (EXPERTS, ROWS, COLUMNS)
    with path.open("wb") as file:
        for _ in range(3):
            for expert in range(EXPERTS):
                file.write(np.full(nbytes, expert, np.uint8).tobytes())
    slices = [(name, "f32", i * nbytes * EXPERTS, nbytes, shape) for i, name in enumerate("gud")]
    return ExpertSource(path, {0: slices}, model_hash="pattern")


@pytest.fixture(scope="module")
def memory(big: ExpertSource) -> Iterator[MemorySource]:
    yield MemorySource(big, locked=True)
    torch.cuda.synchronize()


def patterns(lease) -> torch.Tensor:
    """Smallest and largest byte of every leased expert, int64 [n, 2], computed on the current stream."""
    rows = [lease.views(part)[lease.slots.long().cuda()].flatten(1) for part in ("gate", "up", "down")]
    whole = torch.cat(rows, 1)
    return torch.stack([whole.amin(1), whole.amax(1)], 1).long()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_s10_locked_memory_is_what_the_plan_says(big: ExpertSource):
    torch.cuda.synchronize()
    before = resident_bytes()
    source = MemorySource(big, locked=True)
    grown = resident_bytes() - before
    assert source.locked_bytes == source.memory_bytes
    assert source.memory_bytes <= 1.001 * EXPERTS * big.expert_nbytes(0)
    assert abs(grown - source.memory_bytes) <= tol("stream/memory plan") * source.memory_bytes
    with ExpertCache(slots=4, threads=3) as cache:
        cache.bind(big, "cuda")
        assert cache.memory is not None
        assert cache._arena.locked_bytes == cache.memory.locked_bytes  # type: ignore[union-attr]
        assert cache.memory.locked_bytes < 5.01 * big.slot_bytes


@pytest.mark.parametrize("slots", [1, 2, 7, EXPERTS], ids="slots{}".format)
def test_experts_from_locked_memory_are_right_behind_long_kernels(memory: MemorySource, slots: int):
    seen, asked = [], []
    with ExpertCache(slots=slots) as cache:
        cache.bind(memory, "cuda")
        for wave in cache.waves(range(EXPERTS)):
            torch.cuda._sleep(LONG_CYCLES // 100)
            with cache.lease(memory, 0, wave) as lease:
                seen.append(patterns(lease))
                asked += wave
        torch.cuda.synchronize()
        assert torch.cat(seen).cpu().tolist() == [[e, e] for e in asked]
        assert (cache.misses, cache.bytes_read) == (EXPERTS, EXPERTS * memory.expert_nbytes(0))


@pytest.mark.parametrize("io", ["direct", "dropped", "buffered"])
def test_a_packed_file_brings_the_same_bytes(big: ExpertSource, tmp_path: Path, io: str):
    packed = PackedSource(pack(big, tmp_path / "x.experts").path)
    if io == "direct" and packed.open().io_mode != "direct":
        pytest.skip("this file system serves no direct reads")
    with ExpertCache(slots=5, io=io, verify="strict") as cache:  # type: ignore[arg-type]
        cache.bind(packed, "cuda")
        for wave in cache.waves(range(0, EXPERTS, 3)):
            with cache.lease(packed, 0, wave) as lease:
                assert patterns(lease).cpu().tolist() == [[e, e] for e in wave]
        assert cache.io_mode == io
        assert cache.verifier is not None
        assert cache.verifier.checked == cache.misses == 16


@pytest.mark.parametrize("locked", [True, False], ids=["locked", "file"])
def test_what_was_read_ahead_is_right_on_any_stream(big: ExpertSource, memory: MemorySource, locked: bool):
    source, side, seen, asked = memory if locked else big, torch.cuda.Stream(), [], []
    with ExpertCache(slots=6, threads=4) as cache:
        cache.bind(source, "cuda")
        for step in range(24):
            now, stream = [2 * step, 2 * step + 1], side if step % 2 else torch.cuda.current_stream()
            with torch.cuda.stream(stream), cache.lease(source, 0, now) as lease:
                cache.prefetch(source, 0, [e for e in (2 * step + 2, 2 * step + 3) if e < EXPERTS])
                torch.cuda._sleep(LONG_CYCLES // 100)
                seen.append(patterns(lease))
                asked += now
        torch.cuda.synchronize()
        assert torch.cat([s.cpu() for s in seen]).tolist() == [[e, e] for e in asked]
        assert cache.read_ahead > 0
        assert cache.hits + cache.misses == 48


def test_read_ahead_beside_threads_that_demand(big: ExpertSource):
    wrong: list[object] = []

    def work(seed: int, cache: ExpertCache) -> None:
        rng = np.random.default_rng(seed)
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(25):
                    experts = sorted(rng.choice(12, 3, replace=False).tolist())
                    with cache.lease(big, 0, experts) as lease:
                        cache.prefetch(big, 0, rng.choice(12, 2, replace=False).tolist())
                        seen = patterns(lease).cpu().tolist()
                    if seen != [[e, e] for e in experts]:
                        wrong.append((experts, seen))
                    if rng.random() < 0.1:
                        cache.cancel_prefetches()
        except BaseException as error:
            wrong.append(error)

    with ExpertCache(slots=11, threads=3) as cache:
        cache.bind(big, "cuda")
        threads = [threading.Thread(target=work, args=(seed, cache)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_closing_behind_background_copies_waits_for_them(memory: MemorySource):
    cache = ExpertCache(slots=4)
    cache.bind(memory, "cuda")
    torch.cuda._sleep(LONG_CYCLES)
    assert cache.prefetch(memory, 0, [1, 2]) == [1, 2]
    cache.close()
    assert torch.cuda.current_stream().query()


def test_a_stream_is_current_inside_its_block_and_the_one_before_afterwards():
    side, outer = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(outer):
        with running_on(side):
            assert torch.cuda.current_stream() == side
        assert torch.cuda.current_stream() == outer
        with pytest.raises(ZeroDivisionError), running_on(side):
            _ = 1 // 0
        assert torch.cuda.current_stream() == outer
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    there = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with running_on(side):
        torch.cuda._sleep(LONG_CYCLES)
        there.fill_(7)
    assert torch.cuda.current_stream().query()  # nothing of it went to the current stream
    torch.cuda.synchronize()
    assert float(there) == 7


def test_a_locked_block_is_locked_exactly_and_copies_are_asynchronous():
    block = LockedBlock(5 << 20)
    assert block.locked_bytes == 5 << 20
    assert block.tensor.is_pinned()
    there = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(LONG_CYCLES)
    there.copy_(block.tensor.fill_(7), non_blocking=True)
    assert not torch.cuda.current_stream().query()  # the call came back before the copy
    torch.cuda.synchronize()
    assert int(there.min()) == int(there.max()) == 7
    block.close()


def test_calibration_of_copies_has_both_kinds_and_locked_is_faster():
    points = calibrate_copies(torch.device("cuda", 0), sizes=(1 << 20, 16 << 20), rounds=10)
    speed = {(p.pinned, p.nbytes): p.gb_per_s for p in points}
    assert len(speed) == 4
    assert speed[True, 16 << 20] > speed[False, 16 << 20] > 0.5
