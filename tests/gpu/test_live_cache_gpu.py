"""Device routing over a live cache on the GPU: host routing's bits and counters, whatever moves in and out."""

import functools
import itertools

import pytest
import torch

import moe_lab as lab
from moe_lab.layer import MoELayer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
LAYERS, REPEATS = (1, 3), 100
COUNTERS = ("hits", "misses", "bytes_read", "weight_bytes")


def opened(**cache) -> dict[int, MoELayer]:
    ckpt, held = lab.open(lab.sample()), lab.ExpertCache(**cache)
    return {i: ckpt.layer(i, "cuda", cache=held) for i in LAYERS}


@functools.cache
def rows(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, 256, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


@pytest.mark.parametrize(("slots", "policy"), [(4, "lru"), (14, "lfu"), (40, "lru"), (64, "s3fifo")], ids=str)
def test_bits_and_counters_are_those_of_host_routing(slots: int, policy: str) -> None:
    by_host, by_device = (opened(slots=slots, policy=policy) for _ in range(2))
    for seed in range(REPEATS):
        i, tokens = LAYERS[seed % 2], (1, 2, 8)[seed % 3]
        options = lab.Options(routing="device", shared=("main", "side")[seed // 2 % 2], verify_routing=seed % 5 == 0)
        want, got = by_host[i](rows(tokens, seed), "gemv"), by_device[i](rows(tokens, seed), "gemv", options=options)
        assert torch.equal(got.out, want.out), seed
        assert torch.equal(got.routing.weights, want.routing.weights)
        for name in COUNTERS:
            assert getattr(got.timing, name) == getattr(want.timing, name), (seed, name)


def test_background_reads_may_take_any_slot() -> None:
    ckpt = lab.open(lab.sample())
    own, resident = opened(slots=10), {i: ckpt.layer(i, "cuda") for i in LAYERS}
    for seed, i in itertools.product(range(REPEATS // 2), LAYERS):
        x, experts = rows(1 + seed % 3, seed), own[i].experts
        experts.cache.prefetch(experts.source, i, [seed % 32, (seed + 7) % 32])
        got = own[i](x, "gemv", options=lab.Options(routing="device"))
        assert torch.equal(got.out, resident[i](x, "gemv").out), (seed, i)


def test_two_streams_share_one_table() -> None:
    ckpt = lab.open(lab.sample())
    own, resident = opened(slots=12), {i: ckpt.layer(i, "cuda") for i in LAYERS}
    want = {(i, s): resident[i](rows(2, s), "gemv").out for i in LAYERS for s in range(20)}
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    made = {}
    for s, i in itertools.product(range(20), LAYERS):
        with torch.cuda.stream(streams[(s + i // 2) % 2]):
            made[i, s] = own[i](rows(2, s), "gemv", options=lab.Options(routing="device")).out
    torch.cuda.synchronize()
    assert all(torch.equal(made[key], want[key]) for key in want)
