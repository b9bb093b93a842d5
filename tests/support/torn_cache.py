"""A cache in a process of its own that Ctrl-C strikes at any moment, and small scripts about one in a fresh Python."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.source import ExpertSource
from tests.support.expert_files import held, wanted, write_experts
from tests.support.faulty_disk import until, usable

ROOT = Path(__file__).parents[2]
EXPERTS = 8


class Interrupts:
    """SIGINT after random moments, `count` of them; raises KeyboardInterrupt where `armed`, once each time, and so
    never in the bookkeeping of the test itself."""

    def __init__(self, count: int) -> None:
        self.armed = False
        self._count = count
        signal.signal(signal.SIGINT, self._strike)
        self._presser = threading.Thread(target=self._press, daemon=True)
        self._presser.start()

    @property
    def to_come(self) -> bool:
        return self._presser.is_alive()

    def _strike(self, *_: object) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def _press(self) -> None:
        rng = random.Random(1)
        for _ in range(self._count):
            time.sleep(rng.random() * 0.004)
            os.kill(os.getpid(), signal.SIGINT)


def torn(path: str, presses: int, ahead: bool) -> None:
    """Requests (and guesses, with `ahead`) torn `presses` times: bytes are always right, no slot or hold is lost."""
    source = write_experts(Path(path))
    cache = ExpertCache(slots=4 if ahead else 3, threads=2)
    cache.bind(source, "cpu")
    caught, calls, rng = 0, 0, random.Random(2)
    interrupts = Interrupts(presses)
    while interrupts.to_come:
        try:
            interrupts.armed = True
            while interrupts.to_come:
                _call(cache, source, rng, ahead)
                calls += 1
        except KeyboardInterrupt:
            caught += 1
    interrupts.armed = False
    (part,) = cache._partitions
    until(lambda: not any(entry.holds for entry in part.entries.values()))
    usable(cache, source)
    assert min(caught, calls) > presses * 0.3, (caught, calls)
    assert cache.read_ahead > 10 or not ahead, cache.read_ahead
    print("fine")


def _call(cache: ExpertCache, source: ExpertSource, rng: random.Random, ahead: bool) -> None:
    layer, experts = rng.randrange(2), rng.sample(range(EXPERTS), 2 if ahead else 3)
    if ahead:
        cache.prefetch(source, rng.randrange(2), rng.sample(range(EXPERTS), 2))
    with cache.lease(source, layer, experts, timeout_s=10) as lease:
        assert held(lease) == wanted(source, layer, experts)
    if ahead and rng.random() < 0.2:
        cache.cancel_prefetches()


def run_script(body: str, path: Path) -> str:
    """Run `body` in a fresh Python, `path` its first argument; its output. Fails with what it said when it fails or
    does not end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-c", textwrap.dedent(body), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
