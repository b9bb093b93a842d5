"""The expert cache on a GPU: right bytes whatever the order in which copies, kernels and reads happen to run."""

import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.source import ExpertSource
from moe_lab.system.devices import current_stream
from tests.support.expert_files import held, wanted, write_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LONG_CYCLES = 50_000_000  # about 30 ms of a GPU at 1.7 GHz: far longer than a read of these files
BIG_ROWS, BIG_COLUMNS, BIG_EXPERTS = 1024, 683, 100  # three f32 parts: 8.4 MB an expert


def test_the_current_stream_is_torchs():
    device, side = torch.device("cuda", 0), torch.cuda.Stream()
    for stream in (torch.cuda.default_stream(), side):
        with torch.cuda.stream(stream):
            mine = current_stream(device)
            assert (mine, mine.cuda_stream) == (stream, stream.cuda_stream)
            assert current_stream(device) is mine
            event = torch.cuda.Event()
            event.record(mine)
            mine.wait_event(event)
    assert current_stream(torch.device("cuda")) == torch.cuda.current_stream()


def bound(source: ExpertSource, **how) -> ExpertCache:
    cache = ExpertCache(**how)
    cache.bind(source, "cuda")
    return cache


@pytest.fixture
def source(tmp_path: Path) -> ExpertSource:
    return write_experts(tmp_path / "x.bin")


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> ExpertSource:
    """100 experts of 8.4 MB; every byte of expert e is e."""
    path = tmp_path_factory.mktemp("experts") / "big.bin"
    nbytes, shape = BIG_ROWS * BIG_COLUMNS * 4, (BIG_EXPERTS, BIG_ROWS, BIG_COLUMNS)
    with path.open("wb") as file:
        for _ in range(3):
            for expert in range(BIG_EXPERTS):
                file.write(np.full(nbytes, expert, np.uint8).tobytes())
    stack = nbytes * BIG_EXPERTS
    return ExpertSource(path, {0: [(name, "f32", i * stack, nbytes, shape) for i, name in enumerate("gud")]})


def patterns(lease) -> torch.Tensor:
    """Smallest and largest byte of every leased expert, int64 [n, 2], computed on the current stream."""
    rows = [lease.views(part)[lease.slots.long().cuda()].flatten(1) for part in ("gate", "up", "down")]
    whole = torch.cat(rows, 1)
    return torch.stack([whole.amin(1), whole.amax(1)], 1).long()


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 16], ids="slots{}".format)
@pytest.mark.parametrize("threads", [1, 4], ids="threads{}".format)
def test_every_wave_shows_the_files_bytes(source: ExpertSource, slots: int, threads: int):
    rng = np.random.default_rng(slots)
    with bound(source, slots=slots, threads=threads) as cache:
        for _ in range(30):
            layer, experts = int(rng.integers(2)), rng.choice(8, 3, replace=False).tolist()
            for wave in cache.waves(experts):
                with cache.lease(source, layer, wave) as lease:
                    assert held(lease) == wanted(source, layer, wave)


def test_s08_buffers_are_refilled_only_after_their_copies(big: ExpertSource):
    with bound(big, slots=BIG_EXPERTS, threads=2) as cache:
        for first in range(0, BIG_EXPERTS, 20):
            torch.cuda._sleep(LONG_CYCLES)  # every copy of this wave is queued behind it
            cache.lease(big, 0, range(first, first + 20)).release()
        with cache.lease(big, 0, range(BIG_EXPERTS)) as lease:
            assert lease.hits == BIG_EXPERTS
            seen = patterns(lease).cpu()
    assert seen[:, 0].tolist() == seen[:, 1].tolist() == list(range(BIG_EXPERTS))


def test_slots_are_refilled_only_after_the_kernels_that_read_them(big: ExpertSource):
    seen = []
    with bound(big, slots=2, threads=2) as cache:
        for expert in range(0, 20, 2):
            with cache.lease(big, 0, [expert, expert + 1]) as lease:
                torch.cuda._sleep(LONG_CYCLES // 10)
                seen.append(patterns(lease))
    assert torch.cat(seen).cpu().tolist() == [[e, e] for e in range(20)]


def test_a_side_streams_kernels_are_waited_for(big: ExpertSource):
    side, seen = torch.cuda.Stream(), []
    with bound(big, slots=1, threads=2) as cache:
        for expert in range(10):
            stream = side if expert % 2 else torch.cuda.current_stream()
            with torch.cuda.stream(stream), cache.lease(big, 0, [expert]) as lease:
                torch.cuda._sleep(LONG_CYCLES // 10)
                seen.append(patterns(lease))
        torch.cuda.synchronize()
        assert torch.cat(seen).cpu().tolist() == [[e, e] for e in range(10)]


def test_a_hit_on_another_stream_waits_for_the_copy(big: ExpertSource):
    side = torch.cuda.Stream()
    with bound(big, slots=8, threads=2) as cache:
        torch.cuda._sleep(LONG_CYCLES)
        with cache.lease(big, 0, range(8)), torch.cuda.stream(side), cache.lease(big, 0, range(8)) as again:
            assert again.hits == 8
            seen = patterns(again)
        side.synchronize()
        assert seen.cpu().tolist() == [[e, e] for e in range(8)]


def test_threads_with_streams_of_their_own_see_their_experts(big: ExpertSource):
    wrong: list[object] = []

    def work(seed: int, cache: ExpertCache) -> None:
        rng = np.random.default_rng(seed)
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(25):
                    experts = sorted(rng.choice(12, 3, replace=False).tolist())
                    with cache.lease(big, 0, experts) as lease:
                        seen = patterns(lease).cpu().tolist()
                    if seen != [[e, e] for e in experts]:
                        wrong.append((experts, seen))
        except BaseException as error:
            wrong.append(error)

    with bound(big, slots=10, threads=3) as cache:
        threads = [threading.Thread(target=work, args=(seed, cache)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
    assert not wrong


class Refused:
    """The CUDA runtime, except that locking fails as it does for real, with an error that CUDA keeps for later."""

    def __init__(self) -> None:
        self._real = torch.cuda.cudart()

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert int(self._real.cudaHostRegister(address, nbytes, flags)) == 0
        code = int(self._real.cudaHostRegister(address, nbytes, flags))  # locked already: refused
        self._real.cudaHostUnregister(address)
        return code


def test_s11_failed_page_locking_falls_back_with_one_warning(source: ExpertSource, monkeypatch: pytest.MonkeyPatch):
    runtime = Refused()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with bound(source, slots=4) as cache:
            for layer in (0, 1):
                with cache.lease(source, layer, [5, 1, 2]) as lease:
                    assert held(lease) == wanted(source, layer, [5, 1, 2])
            assert int(torch.ones(10, device="cuda").sum()) == 10  # the next kernel runs
    assert [str(w.message).split()[0] for w in caught if w.category is RuntimeWarning] == ["page-locking"]


def test_the_ring_is_page_locked(source: ExpertSource):
    with bound(source, slots=4, threads=3) as cache:
        stages = cache._arena.stages.every  # type: ignore[union-attr]
        assert len(stages) >= 5
        assert all(stage.tensor.is_pinned() for stage in stages)


def test_more_than_the_gpu_has_is_halved_before_it_is_taken(big: ExpertSource):
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    slots = free // big.slot_bytes + 1
    with pytest.warns(RuntimeWarning, match=f"slots={slots} .* got slots={slots // 2} .* of memory on cuda:0 are free"):
        cache = bound(big, slots=slots)
    with cache, cache.lease(big, 0, [7]) as lease:
        assert cache.slots == slots // 2
        assert patterns(lease).cpu().tolist() == [[7, 7]]
    del lease, cache
    torch.cuda.empty_cache()


def test_poison_is_there_before_a_copy_and_behind_the_kernels_that_read_the_slot(big: ExpertSource):
    with bound(big, slots=1, poison=True) as cache:
        torch.cuda.synchronize()
        assert cache._arena is not None
        assert bool((cache._arena.tensor == 255).all())
        with cache.lease(big, 0, [3]) as lease:
            torch.cuda._sleep(LONG_CYCLES)
            first = patterns(lease)
        with cache.lease(big, 0, [4]) as lease:
            second = patterns(lease)
        assert (first.cpu().tolist(), second.cpu().tolist()) == ([[3, 3]], [[4, 4]])


def test_closing_behind_queued_kernels_waits_for_them(big: ExpertSource):
    cache = bound(big, slots=2)
    with cache.lease(big, 0, [3, 4]) as lease:
        torch.cuda._sleep(LONG_CYCLES)
        seen = patterns(lease)
    del lease
    cache.close()
    torch.empty(2 * big.slot_bytes, dtype=torch.uint8, device="cuda").fill_(255)  # likely the same memory
    assert seen.cpu().tolist() == [[3, 3], [4, 4]]
