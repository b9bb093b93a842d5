"""Two-phase fetch: what is at hand is computed while the rest lands; an error in between leaves nothing half done."""

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import moe_lab as lab
from moe_lab.arms import ARMS, Group, Schedule
from moe_lab.errors import CheckpointError, LabError
from moe_lab.execution import call, state
from moe_lab.execution.two_phase import phases
from moe_lab.stream.events import EventLog, Kind
from moe_lab.stream.source import ExpertSource
from tests.support.expert_files import held, wanted, write_experts
from tests.support.faulty_disk import Disk, bound, until, usable

LAYER = 3


class TestLease:
    @pytest.fixture
    def disk(self) -> Disk:
        return Disk()

    @pytest.fixture
    def source(self, tmp_path: Path, disk: Disk) -> ExpertSource:
        return write_experts(tmp_path / "x.bin", read_call=disk)

    def test_what_is_at_hand_may_be_used_at_once_and_the_rest_after_waiting(self, source: ExpertSource, disk: Disk):
        with bound(source, slots=4, threads=2) as cache:
            cache.lease(source, 0, [1, 2]).release()
            disk.open.clear()
            with cache.lease(source, 0, [5, 1, 2, 7], wait=False) as lease:
                assert lease.awaited == {5, 7}
                assert (lease.hits, lease.misses, lease.bytes_read) == (2, 2, 2 * source.expert_nbytes(0))
                seen, want = held(lease), wanted(source, 0, [5, 1, 2, 7])
                assert seen[1:3] == want[1:3]
                assert lease.wait_ms == 0
                disk.open.set()
                lease.wait()
                assert (held(lease), lease.awaited) == (want, frozenset())
                lease.wait()
            assert (cache.hits, cache.misses) == (2, 4)
            usable(cache, source)

    def test_a_lease_let_go_before_its_second_phase_loses_nothing(self, source: ExpertSource, disk: Disk):
        with bound(source, slots=3, threads=2) as cache:
            cache.lease(source, 0, [1]).release()
            disk.open.clear()
            cache.lease(source, 0, [1, 5, 6], wait=False).release()
            disk.open.set()
            until(lambda: cache.misses == 3)
            assert cache.hits == 0, "the request did not succeed"
            usable(cache, source)

    def test_an_error_in_the_second_phase_ends_the_lease(self, source: ExpertSource, disk: Disk):
        with bound(source, slots=3, threads=1) as cache:
            cache.lease(source, 0, [1]).release()
            disk.errors = [errno.EIO] * 20
            lease = cache.lease(source, 0, [1, 5], wait=False)
            with pytest.raises(CheckpointError, match="layer 0 expert 5"):
                lease.wait()
            with pytest.raises(LabError, match="has ended"):
                lease.views("gate")
            disk.errors = []
            lease.release()
            usable(cache, source)

    def test_closed_between_the_phases(self, source: ExpertSource, disk: Disk):
        with bound(source, slots=3, threads=1) as cache:
            disk.open.clear()
            lease = cache.lease(source, 0, [1, 5], wait=False)
            threading.Timer(0.05, disk.open.set).start()
            cache.close()
            with pytest.raises(LabError, match="closed"):
                lease.wait()

    def test_only_real_blocking_is_noted_as_a_wait(self, source: ExpertSource, disk: Disk):
        log = EventLog()
        with bound(source, slots=3, threads=2) as cache:
            cache.record(log)
            with cache.lease(source, 0, [1, 5], wait=False) as lease:
                until(lambda: cache.misses == 2)
                lease.wait()
            kinds = log.table()["kind"].tolist()
            assert Kind.BYTES_WAIT not in kinds
            assert [k for k in kinds if k in (Kind.ASKED, Kind.USED, Kind.GRANTED, Kind.ENDED)] == [
                Kind.ASKED, Kind.USED, Kind.USED, Kind.GRANTED, Kind.ENDED,
            ]  # fmt: skip


class Watched:
    """gemv; what it was given, and a hook before each hand-over."""

    name = "watched"

    def __init__(self, arm: str = "gemv", before=lambda: None) -> None:
        self._arm, self._before = ARMS[arm], before
        self.given: list[list[int]] = []

    def supports(self, formats: Sequence[str], backend: str) -> str | None:
        return self._arm.supports(formats, backend)

    def experts(self, x, stack, schedule, groups, y, ctx) -> None:
        self._before()
        self.given.append([g.expert for g in groups])
        self._arm.experts(x, stack, schedule, groups, y, ctx)

    def shared(self, x, stack, ctx):
        return self._arm.shared(x, stack, ctx)  # type: ignore[attr-defined]


class Gate:
    """`os.preadv` that waits until it is opened, and may then fail."""

    def __init__(self) -> None:
        self.open, self.code = threading.Event(), 0
        self.open.set()

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert self.open.wait(20), "nobody computed meanwhile"
        if self.code:
            raise OSError(self.code, os.strerror(self.code))
        return os.preadv(fd, buffers, offset)


class TestCall:
    @pytest.fixture
    def gate(self) -> Gate:
        return Gate()

    @pytest.fixture
    def ckpt(self, gate: Gate):
        with lab.open(lab.sample()) as ckpt:
            ckpt.__dict__["expert_source"] = ckpt.expert_source.reading_through(gate)
            yield ckpt

    @pytest.fixture
    def xs(self) -> list[torch.Tensor]:
        """Two tokens that share some of their picks."""
        draw = torch.Generator().manual_seed(1)
        first = torch.randn(1, 256, generator=draw)
        return [first, first + 0.7 * torch.randn(1, 256, generator=draw)]

    @pytest.mark.parametrize("arm", ["gemv", "reference", "mmq", "per_token"])
    def test_resident_experts_are_computed_before_the_others_are_read(self, ckpt, gate: Gate, xs: list, arm: str):
        resident = ckpt.layer(LAYER)
        before, after = (set(resident.route(x).ids.flatten().tolist()) for x in xs)
        assert before & after
        assert after - before
        expected = resident(xs[1], arm)
        with lab.ExpertCache(12, threads=2) as cache:
            layer = ckpt.layer(LAYER, cache=cache)
            layer(xs[0], arm)
            gate.open.clear()
            watched = Watched(arm, gate.open.set)  # only the arm opens the file
            y = layer(xs[1], watched)
        assert torch.equal(y.out, expected.out)
        assert watched.given == [sorted(before & after), sorted(after - before)]
        assert y.timing.submissions == 2
        assert y.timing.weight_bytes == expected.timing.weight_bytes

    def test_all_at_hand_or_none_is_one_submission(self, ckpt, xs: list):
        with lab.ExpertCache(12, threads=2) as cache:
            layer, watched = ckpt.layer(LAYER, cache=cache), Watched()
            assert layer(xs[0], watched).timing.submissions == 1
            assert layer(xs[0], watched).timing.submissions == 1
        assert [len(given) for given in watched.given] == [4, 4]

    def test_an_error_while_the_shared_expert_runs_beside_joins_it_first(
        self, ckpt, gate: Gate, xs: list, monkeypatch: pytest.MonkeyPatch
    ):
        """A lane that, as a stream does, has not run its work before it is joined."""
        story: list[str] = []

        class Lane(state.side_lane(torch.device("cpu")).__class__):
            def fork(self) -> None:
                story.append("fork")

            def running(self):
                story.append("shared queued")
                return super().running()

            def join(self) -> None:
                story.append("joined")

        monkeypatch.setattr(state, "side_lane", lambda device: Lane())
        close = call.Execution.open_scratch

        def opened(self, user, lane=state.MAIN):
            scratch = close(self, user, lane)
            self._held.callback(lambda: story.append(f"scratch of {user} given back"))
            return scratch

        monkeypatch.setattr(call.Execution, "open_scratch", opened)
        expected = ckpt.layer(LAYER)(xs[1], "gemv").out
        with lab.ExpertCache(4, threads=2) as cache:
            layer, options = ckpt.layer(LAYER, cache=cache), lab.Options(shared="side", prefetch=2)
            layer(xs[0], "gemv", options=options)
            story.clear()
            gate.code = errno.EIO
            with pytest.raises(CheckpointError, match=f"layer {LAYER} expert"):
                layer(xs[1], "gemv", options=options)
            gate.code = 0
            assert story[:3] == ["fork", "shared queued", "joined"]
            assert set(story[3:]) == {"scratch of shared expert given back", "scratch of call given back"}
            for _ in range(2):
                assert torch.equal(layer(xs[1], "gemv", options=options).out, expected)
            assert cache._partitions[0].held == 0

    def test_an_arm_that_raises_in_the_first_phase_leaves_a_usable_cache(self, ckpt, gate: Gate, xs: list):
        class Broken(Watched):
            def experts(self, x, stack, schedule, groups, y, ctx) -> None:
                raise ValueError("arm bug")

        expected = ckpt.layer(LAYER)(xs[1], "gemv").out
        with lab.ExpertCache(8, threads=2) as cache:
            layer = ckpt.layer(LAYER, cache=cache)
            layer(xs[0], "gemv")
            gate.open.clear()
            with pytest.raises(LabError, match="arm bug"):
                layer(xs[1], Broken())
            gate.open.set()
            until(lambda: not any(e.holds for e in cache._partitions[0].entries.values()))
            assert torch.equal(layer(xs[1], "gemv").out, expected)

    def test_more_experts_than_slots_come_in_waves_each_in_two_phases(self, ckpt, xs: list):
        x = torch.cat([*xs, *(torch.randn(1, 256, generator=torch.Generator().manual_seed(s)) for s in range(4))])
        expected = ckpt.layer(LAYER)(x, "gemv")
        picked = sorted(set(expected.routing.ids.flatten().tolist()))
        with lab.ExpertCache(5, threads=2) as cache:
            layer, watched = ckpt.layer(LAYER, cache=cache), Watched()
            layer(xs[0], "gemv")
            misses = cache.misses
            y = layer(x, watched)
            assert torch.equal(y.out, expected.out)
            assert sorted(e for given in watched.given for e in given) == picked, "an expert was handed over twice"
            assert cache.misses - misses == y.timing.misses <= len(picked)
            assert y.timing.hits + y.timing.misses == len(picked)


def test_groups_with_gaps_get_a_schedule_of_their_own():
    token, slot = torch.tensor([0, 1, 0, 2, 1, 2]), torch.tensor([0, 0, 1, 0, 1, 1])
    groups = (Group(2, 0, 2), Group(4, 2, 1), Group(7, 3, 3))
    whole = Schedule(token, slot, torch.arange(6.0), (groups,))
    (now, first, late), (then, second, later) = phases(whole, groups, {4})
    assert (late, later) == (False, True)
    assert list(first) == [Group(2, 0, 2), Group(7, 2, 3)]
    assert now.token.tolist() == [0, 1, 2, 1, 2]
    assert now.weight.tolist() == [0, 1, 3, 4, 5]
    assert then is whole
    assert list(second) == [Group(4, 2, 1)]
    assert [p[2] for p in phases(whole, groups, ())] == [False]
    assert [p[2] for p in phases(whole, groups, {2, 4, 7})] == [True]
    assert list(phases(whole, (), {1})) == []
