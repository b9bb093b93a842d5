"""Fetch and compute at once on a GPU: the resident layer's bits whatever lands when, and errors that leave nothing
half done.
"""

import errno
from pathlib import Path

import pytest
import torch

import moe_lab as lab
from moe_lab.errors import CheckpointError
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.faults import FaultyReads
from moe_lab.stream.memory_source import MemorySource
from moe_lab.stream.source import ExpertSource
from tests.support.expert_files import write_experts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
MODEL = Path(__file__).resolve().parents[2] / "data" / "lab-42m.gguf"
LONG_CYCLES = 200_000_000  # about 0.1 s of a GPU: far longer than a read or a copy of these experts


def steps(tokens: int, count: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    with lab.open(MODEL) as ckpt:
        assert ckpt.spec is not None
        return [torch.randn(tokens, ckpt.spec.d_model, generator=draw).bfloat16().cuda() for _ in range(count)]


def walk(ckpt, xs: list[torch.Tensor], arm: str, **how) -> list[torch.Tensor]:
    """Every step through all layers, each fed with the one before; the outputs."""
    options, cache = lab.Options(**how.pop("options", {})), how.pop("cache", None)
    layers = [ckpt.layer(i, device="cuda", cache=cache) for i in ckpt.moe_layers]
    outs = []
    for x in xs:
        for layer in layers:
            y = layer(x, arm, options=options)
            outs.append(y.out)
            x = (x.float() + y.out.float()).bfloat16()
    return outs


@pytest.mark.parametrize(
    ("arm", "slots", "options"),
    [
        ("gemv", 3, {}),
        ("gemv", 20, {"prefetch": 4}),
        ("per_token", 20, {"prefetch": 4}),
        ("gemv", 48, {"prefetch": 8, "shared": "side"}),
        ("mmq", 48, {"prefetch": 8, "shared": "side"}),
        ("gemv", 100, {"prefetch": {1: 0, 2: 4, 3: 4, 4: 6, 5: 6}}),
    ],
    ids=[
        "gemv-3-slots",
        "gemv-20-ahead-4",
        "tokens-20-ahead-4",
        "gemv-48-ahead-8-side",
        "mmq-48-ahead-8-side",
        "by-layer",
    ],
)
def test_streamed_layers_have_the_resident_bits(arm: str, slots: int, options: dict):
    for tokens in (1, 5):
        xs = steps(tokens, 4)
        with lab.open(MODEL) as ckpt:
            wanted = walk(ckpt, xs, arm)
            source = ckpt.expert_source
            for locked in (False, True):
                ckpt.__dict__["expert_source"] = MemorySource(source, locked=True) if locked else source
                with ExpertCache(slots, policy="lfu_decay", threads=4) as cache:
                    seen = walk(ckpt, xs, arm, cache=cache, options=options)
                    torch.cuda.synchronize()
                    assert cache.read_ahead > 0 or not options.get("prefetch")
                assert all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> ExpertSource:
    """16 experts of 8.4 MB."""
    path = tmp_path_factory.mktemp("experts") / "big.bin"
    return write_experts(path, layers=[0], experts=16, shapes=lambda _: ((1024, 683),) * 3)


def test_kernels_of_what_is_at_hand_do_not_wait_for_what_is_not(big: ExpertSource):
    """The copy stream is held up; the caller's stream finishes the first phase all the same."""

    def bytes_of(lease, which: slice) -> torch.Tensor:
        return lease.views("gate")[lease.slots[which].long().cuda()].long().sum()

    memory = MemorySource(big, locked=True)
    with ExpertCache(8) as cache:
        cache.bind(memory, "cuda")
        with cache.lease(memory, 0, [0, 1]) as lease:
            wanted = int(bytes_of(lease, slice(0, 2)))  # which also loads the kernels: loading waits for the device
        torch.cuda.synchronize()
        arena = cache._arena
        assert arena is not None
        with torch.cuda.stream(arena._streams[False]):  # type: ignore[union-attr]
            torch.cuda._sleep(LONG_CYCLES)
        with cache.lease(memory, 0, [0, 1, 2, 3], wait=False) as lease:
            assert (lease.awaited, lease.blocked) == ({2, 3}, False)
            first = bytes_of(lease, slice(0, 2))
            done = torch.cuda.Event()
            done.record()
            done.synchronize()
            assert not arena.arrived(int(lease.slots[2])), "the copies were not held up: nothing was shown"
            lease.wait()
            rest = bytes_of(lease, slice(2, 4))
        with cache.lease(memory, 0, [2, 3]) as again:
            torch.cuda.synchronize()
            assert (int(first), int(rest)) == (wanted, int(bytes_of(again, slice(0, 2))))


def test_a_fetch_error_while_the_shared_expert_runs_beside_joins_it_and_the_next_call_is_right():
    number, (x, other) = 3, (row for row in steps(2, 2))
    with lab.open(MODEL) as ckpt:
        resident = ckpt.layer(number, device="cuda")
        wanted = resident(x, "gemv").out
        assert not set(resident.route(other).ids.flatten().tolist()) <= set(resident.route(x).ids.flatten().tolist())
        reads = FaultyReads()
        ckpt.__dict__["expert_source"] = ckpt.expert_source.reading_through(reads)
        with ExpertCache(8, threads=2) as cache:
            streamed = ckpt.layer(number, device="cuda", cache=cache)
            options = lab.Options(shared="side", prefetch=4)
            for _ in range(10):
                reads.errors = dict.fromkeys(range(reads.calls + 1, reads.calls + 1000), errno.EIO)
                with pytest.raises(CheckpointError, match="layer 3 expert"):
                    streamed(other, "gemv", options=options)
                reads.errors = {}
                assert torch.equal(streamed(x, "gemv", options=options).out, wanted)
            assert cache._partitions[0].held == 0
