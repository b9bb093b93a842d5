"""Scratch with names: overlaps refused by name, freed memory poisoned, lanes apart, nothing allocated twice."""

import itertools
import threading

import pytest
import torch

from moe_lab import workspace
from moe_lab.errors import LabError
from moe_lab.execution.shared_lane import SideLane
from moe_lab.workspace import Workspace, borrowed, poisoned, size_class
from tests.support.fake_cuda import FakeCuda

CPU = torch.device("cpu")


def test_the_planted_overlap_is_refused_by_name() -> None:
    """The seeds' mistake: the logits' buffer was also the shared expert's gate."""
    space = Workspace(CPU)
    router, shared = space.open("router"), space.open("shared expert")
    router.take("logits", (4, 8), torch.float32)
    with pytest.raises(LabError, match="'shared expert' asks for buffer 'logits' of lane 'main', which 'router' still"):
        shared.take("logits", (4, 8), torch.bfloat16)
    router.close()
    assert shared.take("logits", (4, 8), torch.bfloat16).shape == (4, 8)


def test_a_name_is_taken_once_within_a_phase_too() -> None:
    scratch = Workspace(CPU).open("experts")
    scratch.take("gate", (2, 2), torch.float32)
    with pytest.raises(LabError, match="'experts' asks for buffer 'gate'"):
        scratch.take("gate", (2, 2), torch.float32)


def test_lanes_have_names_and_memory_of_their_own() -> None:
    space = Workspace(CPU)
    main, side = space.open("experts"), space.open("shared expert", "side")
    a, b = main.take("gate", (64,), torch.float32), side.take("gate", (64,), torch.float32)
    assert a.data_ptr() != b.data_ptr()
    side.close()
    assert main.take("up", (64,), torch.float32).data_ptr() != b.data_ptr(), "the side's block went to the main lane"
    assert space.open("again", "side").take("x", (64,), torch.float32).data_ptr() == b.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_poison_shows_missing_writes_and_late_readers(dtype: torch.dtype) -> None:
    scratch = (space := Workspace(CPU, poison=True)).open("experts")
    fresh = scratch.take("gate", (3, 5), dtype)
    assert fresh.isnan().all()
    fresh.fill_(1)
    scratch.close()
    assert fresh.isnan().all(), "a reader after the end still sees the old values"
    assert space.open("next").take("codes", (7,), torch.int8).tolist() == [-1] * 7


def test_phases_inside_phases_give_back_their_own() -> None:
    space = Workspace(CPU)
    outer = space.open("shared")
    kept = outer.take("rows", (8,), torch.float32)
    for _ in range(3):
        with outer.phase("row") as inner:
            inner.take("gate", (8,), torch.float32)
            assert space.live == ("main/rows", "main/gate")
    assert space.live == ("main/rows",)
    assert space.allocations == 2
    kept.fill_(2)
    outer.close()
    outer.close()
    assert space.live == ()
    with pytest.raises(LabError, match="'gate' was asked for in phase 'shared', which has ended"):
        outer.take("gate", (8,), torch.float32)


def test_an_exception_gives_back_what_its_phase_held() -> None:
    space = Workspace(CPU)

    def failing() -> None:
        with space.open("a").phase("b") as inner:
            inner.take("x", (8,), torch.float32)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert space.live == ()


def test_a_repeated_sequence_allocates_nothing() -> None:
    space = Workspace(CPU)
    shapes = [("a", 100), ("b", 5000), ("c", 100), ("d", 70_000), ("e", 5000)]

    def call() -> None:
        scratch = space.open("call")
        for name, n in shapes:
            scratch.take(name, (n,), torch.float32)
            with scratch.phase("part") as inner:
                inner.take("tmp", (n,), torch.float16)
        scratch.close()

    call()
    first = space.allocations
    for _ in range(5):
        call()
    assert space.allocations == first <= 2 * len(shapes)


def test_memory_beyond_the_limit_is_not_kept() -> None:
    space = Workspace(CPU, keep_bytes=10_000)
    for _ in range(3):
        scratch = space.open("call")
        scratch.take("large", (20_000,), torch.int8)
        scratch.take("small", (4_000,), torch.int8)
        scratch.close()
    assert space.allocations == 4, "three times the large one, once the small one"


@pytest.mark.parametrize("nbytes", [0, 1, 512, 513, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1, 123_456_789])
def test_size_classes_waste_an_eighth_at_most(nbytes: int) -> None:
    made = size_class(nbytes)
    assert made % workspace.SMALLEST == 0
    assert nbytes <= made <= max(nbytes * 9 / 8, nbytes + workspace.SMALLEST)
    assert size_class(made) == made


def test_shapes_without_elements() -> None:
    assert Workspace(CPU).open("call").take("y", (0, 4, 8), torch.bfloat16).shape == (0, 4, 8)


def test_each_call_borrows_its_own() -> None:
    workspace.release_idle()
    seen, start = [], threading.Barrier(4)

    def call() -> None:
        with borrowed(CPU) as mine:
            start.wait()
            seen.append(mine)
            mine.open("call").take("y", (8,), torch.float32)
            start.wait()
            mine.give("y", "main")

    threads = [threading.Thread(target=call) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    assert len({id(w) for w in seen}) == 4
    with borrowed(CPU) as again:
        assert any(again is w for w in seen), "an idle one is used again"


def test_a_failed_call_leaves_its_workspace_behind() -> None:
    workspace.release_idle()
    seen = []

    def failing() -> None:
        with borrowed(CPU) as mine:
            seen.append(mine)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    with borrowed(CPU) as fresh:
        assert fresh is not seen[0]


def test_a_buffer_that_nobody_gave_back_is_named() -> None:
    with pytest.raises(LabError, match="still live: main/y"), borrowed(CPU) as mine:
        mine.open("call").take("y", (8,), torch.float32)


def test_poisoned_calls() -> None:
    with borrowed(CPU) as plain, poisoned(), borrowed(CPU) as mine:
        assert mine.poison
        assert not plain.poison


class Merged(Workspace):
    """The planted mistake: one free list for both streams."""

    def pool(self, lane: str) -> str:
        return "one"


def side_and_main(space: Workspace, order: tuple[int, ...]) -> torch.Tensor:
    """A call whose side writes scratch, sleeps and reads it, while the main stream writes scratch of its own: what the
    side read, with queues emptied in `order` (0: a step of main, 1: of side)."""
    cuda = FakeCuda()
    main, beside = cuda.current, cuda.new_stream()
    lane, read = SideLane(CPU, beside, cuda), torch.zeros(64)
    lane.fork()
    with lane.running():
        side = space.open("shared expert", "side")
        hidden = side.take("hidden", (64,), torch.float32)
        beside.queue.append(lambda: hidden.fill_(7))
        beside.queue.append(lambda: read.copy_(hidden))
        side.close()
    scratch = space.open("experts")
    gate = scratch.take("gate", (64,), torch.float32)
    main.queue.append(lambda: gate.fill_(3))
    scratch.close()
    lane.join()
    for turn in order:
        stream = (main, beside)[turn]
        if stream.queue and callable(stream.queue[0]):
            stream.queue.popleft()()
        elif stream.queue:
            stream.queue.popleft().happened = True
    cuda.synchronize()
    return read


@pytest.mark.parametrize("kind", [Workspace, Merged], ids=["own-lanes", "merged"])
def test_merged_lanes_show_in_some_order_of_the_streams(kind: type[Workspace]) -> None:
    right = [bool((side_and_main(kind(CPU), order) == 7).all()) for order in itertools.product((0, 1), repeat=6)]
    assert all(right) if kind is Workspace else not all(right)


def test_the_side_waits_for_the_fork_and_the_main_for_the_side() -> None:
    cuda, done = FakeCuda(), []
    main, beside = cuda.current, cuda.new_stream()
    lane = SideLane(CPU, beside, cuda)
    main.queue.append(lambda: done.append("before"))
    lane.fork()
    main.queue.append(lambda: done.append("router"))
    with lane.running():
        beside.queue.append(lambda: done.append("shared"))
    lane.join()
    main.queue.append(lambda: done.append("sum"))
    beside.synchronize()
    assert done == ["before", "shared"], "the side began before its fork, or waited for the router"
    main.synchronize()
    assert done == ["before", "shared", "router", "sum"]


def test_work_of_a_side_that_failed_is_waited_for() -> None:
    cuda, done = FakeCuda(), []
    main, beside = cuda.current, cuda.new_stream()
    lane = SideLane(CPU, beside, cuda)
    lane.fork()

    def failing() -> None:
        with lane.running():
            beside.queue.append(lambda: done.append("shared"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    lane.join()
    lane.join()
    main.queue.append(lambda: done.append("next call"))
    main.synchronize()
    assert done == ["shared", "next call"]
