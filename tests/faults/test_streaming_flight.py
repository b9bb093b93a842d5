"""Reads and copies that are under way together: each is waited for on its own, and one that fails is told by name."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab.stream import cache as cache_module
from moe_lab.stream import setup
from moe_lab.stream.arena import DeviceArena, Stage
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.policy import make_policy
from moe_lab.stream.slots import SlotTable
from tests.support.expert_files import held, wanted, write_experts
from tests.support.fake_cuda import FakeCuda, LateArena
from tests.support.faulty_disk import bound, until, usable


class SlowLayer:
    """`os.preadv` that keeps everything below `end` waiting until `go`."""

    def __init__(self) -> None:
        self.end, self.waits, self.go = 0, 0, threading.Event()

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset < self.end:
            self.waits += 1
            assert self.go.wait(20)
        return os.preadv(fd, buffers, offset)


def test_s19_two_layers_under_way_at_once_are_each_waited_for_alone(tmp_path: Path):
    disk = SlowLayer()
    source = write_experts(tmp_path / "x.bin", read_call=disk)
    disk.end = source.segments(1, 0)[0].file_offset  # all of layer 0
    with bound(source, slots=8, threads=4) as cache:
        assert cache.prefetch(source, 0, [2]) == [2]
        until(lambda: disk.waits == 1)
        assert cache.prefetch(source, 1, [5]) == [5]
        begin = time.monotonic()
        with cache.lease(source, 1, [5]) as second:  # asked for later, there earlier
            assert held(second) == wanted(source, 1, [5])
        assert time.monotonic() - begin < 5
        first = threading.Thread(target=lambda: cache.lease(source, 0, [2]).release(), daemon=True)
        first.start()
        first.join(0.05)
        assert first.is_alive()  # its own bytes are not there yet
        disk.go.set()
        first.join(10)
        assert not first.is_alive()
        assert (cache.read_ahead, cache.misses) == (2, 0)
        usable(cache, source)


class FailingCopy(LateArena):
    """A device arena that refuses the copy into one slot, as CUDA does where sizes disagree."""

    bad_slot: int | None = None

    def _copy(self, slot: int, stage: Stage, nbytes: int, stream: Any) -> None:
        if slot == self.bad_slot:
            raise RuntimeError("CUDA error: invalid argument")
        super()._copy(slot, stage, nbytes, stream)


@pytest.mark.parametrize("ahead", [False, True], ids=["demand", "read-ahead"])
def test_a_copy_that_fails_is_told_with_layer_and_expert_and_the_next_request_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
):
    cuda, made = FakeCuda(), []

    def make(slots: int, slot_bytes: int, device: torch.device, buffers: int) -> DeviceArena:
        made.append(FailingCopy(slots, slot_bytes, 2, cuda))
        return made[-1]

    monkeypatch.setattr(setup, "DeviceArena", make)
    monkeypatch.setattr(cache_module, "resolve_device", lambda device: torch.device("cuda", 0))
    source = write_experts(tmp_path / "x.bin")
    with ExpertCache(slots=2, threads=2) as cache:
        cache.bind(source, "cuda")
        (arena,) = made
        arena.bad_slot = 0
        if ahead:
            cache.prefetch(source, 1, [6])
            until(lambda: not any(entry.key == (1, 6) for entry in cache._partitions[0].entries.values()))
        else:
            with pytest.raises(LabError, match=r"layer 1 expert 6 .*CUDA error: invalid argument"):
                cache.lease(source, 1, [6])
        arena.bad_slot = None
        with cache.lease(source, 1, [6, 3]) as lease:
            cuda.synchronize()
            assert held(lease) == wanted(source, 1, [6, 3])
            assert lease.misses == 2
        part = cache._partitions[0]
        assert len(part.table.free) + len(part.table.idle) == 2


def test_s14_a_hit_renews_and_the_longest_unused_leaves():
    table = SlotTable(range(3), make_policy("lru"))
    for expert in (1, 2, 3, 1, 4):
        assert table.take([(0, expert)]) is not None
        table.put_back((0, expert))
    assert set(table.resident) == {(0, 1), (0, 3), (0, 4)}
