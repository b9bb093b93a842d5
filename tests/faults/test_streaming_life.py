"""Interrupts, closing, leaving: what a cache must survive, and leave behind."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_lab.errors import LabError
from moe_lab.stream.source import ExpertSource
from tests.support.expert_files import held, wanted, write_experts
from tests.support.faulty_disk import Disk, bound, together, until, usable, waiting
from tests.support.torn_cache import run_script


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Ctrl-C raises here even where the test run was started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def source(tmp_path: Path, disk: Disk) -> ExpertSource:
    return write_experts(tmp_path / "x.bin", read_call=disk)


class TestLife:
    def test_an_interrupt_while_waiting_leaves_a_usable_cache(self, source: ExpertSource, disk: Disk):
        disk.open.clear()
        with bound(source, slots=2) as cache:

            def press() -> None:
                until(lambda: waiting(cache) == 1)
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=press, daemon=True).start()
            with pytest.raises(KeyboardInterrupt):
                cache.lease(source, 0, [1, 2])
            disk.open.set()
            usable(cache, source)

    def test_an_interrupted_caller_does_not_fail_those_who_joined_it(self, source: ExpertSource, disk: Disk):
        disk.open.clear()
        with bound(source, slots=2) as cache:
            joined: list = []

            def join_then_press() -> None:
                until(lambda: waiting(cache) == 1)
                reader = threading.Thread(target=lambda: joined.append(held(cache.lease(source, 0, [1]))), daemon=True)
                reader.start()
                until(lambda: waiting(cache) == 2)
                os.kill(os.getpid(), signal.SIGINT)
                until(lambda: waiting(cache) == 1)
                disk.open.set()
                reader.join(10)

            helper = threading.Thread(target=join_then_press, daemon=True)
            helper.start()
            with pytest.raises(KeyboardInterrupt):
                cache.lease(source, 0, [1])
            helper.join(20)
            assert joined == [wanted(source, 0, [1])]

    @pytest.mark.parametrize("ahead", [False, True], ids=["on-demand", "reading-ahead"])
    def test_300_interrupts_at_any_moment_lose_no_slot(self, tmp_path: Path, ahead: bool):
        script = f"import sys; from tests.support.torn_cache import torn; torn(sys.argv[1], 300, ahead={ahead})"
        assert run_script(script, tmp_path / "x.bin") == "fine"

    def test_leaving_without_closing_ends_the_process(self, tmp_path: Path):
        begin = time.monotonic()
        out = run_script(
            """
            import sys, threading, time
            from pathlib import Path
            from moe_lab.stream.cache import ExpertCache
            from tests.support.expert_files import write_experts
            def stuck(fd, buffers, offset):
                time.sleep(60)
                return 0
            source = write_experts(Path(sys.argv[1]), read_call=stuck)
            cache = ExpertCache(slots=3)
            cache.bind(source, "cpu")
            threading.Thread(target=lambda: cache.lease(source, 0, [1]), daemon=True).start()
            time.sleep(0.2)
            print("fine")
            """,
            tmp_path / "x.bin",
        )
        assert out == "fine"
        assert time.monotonic() - begin < 45  # starting Python and torch, and not the 60 s of the stuck read

    def test_closing_wakes_those_who_wait_for_a_slot(self, source: ExpertSource):
        with bound(source, slots=1) as cache, cache.lease(source, 0, [1]):

            def close() -> None:
                until(lambda: waiting(cache) == 1)
                cache.close()

            error = together(2, lambda i: cache.lease(source, 0, [2], timeout_s=60) if i else close(), within_s=10)[1]
            assert isinstance(error, LabError)
            assert "closed" in str(error)

    def test_closing_wakes_those_who_wait_for_a_read(self, source: ExpertSource, disk: Disk):
        disk.open.clear()
        with bound(source, slots=2) as cache:

            def close() -> None:
                until(lambda: waiting(cache) == 1)
                threading.Timer(0.05, disk.open.set).start()
                cache.close()

            error = together(2, lambda i: cache.lease(source, 0, [1]) if i else close())[1]
            assert isinstance(error, LabError)
            assert "closed" in str(error)
