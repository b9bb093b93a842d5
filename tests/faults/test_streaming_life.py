"""Interrupts, closing, leaving: what a cache must survive, and leave behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_lab.errors import LabError
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.source import ExpertSource
from tests.support.expert_files import held, wanted, write_experts
from tests.support.faulty_disk import Disk, bound, together, until, usable, waiting

ROOT = Path(__file__).parents[2]


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

    def test_300_interrupts_at_any_moment_lose_no_slot(self, tmp_path: Path):
        out = run_script(
            """
            import os, random, signal, threading, time
            source = write_experts(Path(sys.argv[1]))
            cache = ExpertCache(slots=3, threads=2)
            cache.bind(source, "cpu")
            presses, caught, calls, armed = 0, 0, 0, False
            def interrupt(*_):
                global armed
                if armed:  # once each time, and never in this script's own bookkeeping
                    armed = False
                    raise KeyboardInterrupt
            signal.signal(signal.SIGINT, interrupt)
            def press():
                global presses
                rng = random.Random(1)
                while presses < 300:
                    time.sleep(rng.random() * 0.004)
                    presses += 1
                    os.kill(os.getpid(), signal.SIGINT)
            presser = threading.Thread(target=press, daemon=True)
            rng = random.Random(2)
            presser.start()
            while presser.is_alive():
                try:
                    armed = True
                    while presser.is_alive():
                        experts = rng.sample(range(8), 3)
                        with cache.lease(source, rng.randrange(2), experts, timeout_s=10) as lease:
                            calls += 1
                            assert held(lease) == wanted(source, lease.layer, experts)
                except KeyboardInterrupt:
                    caught += 1
            armed = False
            for layer in source.layers:
                for wave in cache.waves(range(8)):
                    with cache.lease(source, layer, wave, timeout_s=10) as lease:
                        assert held(lease) == wanted(source, layer, wave)
            part = cache._partitions[0]
            assert part.held == 0 and len(part.table.idle) + len(part.table.free) == 3
            assert caught > 100 and calls > 100, (caught, calls)
            print("fine")
            """,
            tmp_path / "x.bin",
        )
        assert out == "fine"

    def test_leaving_without_closing_ends_the_process(self, tmp_path: Path):
        begin = time.monotonic()
        out = run_script(
            """
            import threading, time
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

    def test_1000_caches_leave_no_thread_and_no_descriptor(self, source: ExpertSource):
        def once(close: bool) -> None:
            cache = ExpertCache(slots=2, threads=2)
            cache.bind(source, "cpu")
            cache.lease(source, 0, [1, 2]).release()
            if close:
                cache.close()

        once(True)
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for i in range(1000):
            once(close=i % 2 == 0)  # every other one is left to the collector
        until(lambda: threading.active_count() == threads)
        until(lambda: len(os.listdir("/proc/self/fd")) == files)

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


def run_script(body: str, path: Path) -> str:
    """Run `body` in a fresh Python; its output. Fails with what it said when it fails or does not end."""
    head = """
    import sys
    from pathlib import Path
    from moe_lab.errors import CheckpointError
    from moe_lab.stream.cache import ExpertCache
    from tests.support.expert_files import held, wanted, write_experts
    """
    script = textwrap.dedent(head) + textwrap.dedent(body)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
