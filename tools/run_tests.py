"""`make test`: the suites that need no GPU, one summary, one exit code. Further arguments go to pytest.

A process a suite, since two settings hold for a whole process: the fault tests run without the annotation checks (which
would speak before our own error messages do), and the kernel tests run with Triton's interpreter switched on. With two
cores or more, the others run beside the units, one thread each; what they print follows when they have ended.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
_NO_TESTS = 5  # pytest's exit code when nothing was collected or all was deselected


@dataclass(frozen=True)
class Suite:
    """Folders of tests that run in one pytest process."""

    name: str
    folders: tuple[str, ...]
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


_CHECKED = ("--jaxtyping-packages=moe_lab,moe_lab_kernels,typecheck.check",)
SUITES = (  # in the order that keeps two cores busy for the same time: 13, 9, 7 and 2 minutes
    Suite("units", ("tests/unit",), _CHECKED),
    Suite("oracles, notebooks, pages", ("tests/oracles", "tests/notebooks", "tests/ui"), _CHECKED),
    Suite("kernels in the interpreter", ("tests/kernels",), environment={"TRITON_INTERPRET": "1"}),
    Suite("faults", ("tests/faults",)),
)


@dataclass(frozen=True)
class Outcome:
    """Counts of one suite; `bad`: pytest said no, or found nothing to run."""

    passed: int
    failed: int
    skipped: int
    seconds: float
    bad: bool


def run(suite: Suite, arguments: list[str], *, beside: bool = False) -> Outcome:
    """Run one suite, its output going straight to the terminal, or `beside` another: shown when it has ended."""
    if not beside:
        print(f"\n== {suite.name} ==", flush=True)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | suite.environment
    if together():  # threads of one process waiting for a core that the other has make both many times slower
        environment |= {"OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "--durations=5", f"--junitxml={counts}"]
        start = time.perf_counter()
        done = subprocess.run(
            [*command, *suite.options, *suite.folders, *arguments],
            cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE if beside else None, stderr=subprocess.STDOUT if beside else None,
        )  # fmt: skip
        code = done.returncode
        seconds = time.perf_counter() - start
        totals = ElementTree.parse(counts).getroot().find("testsuite") if counts.exists() else None
    if beside:
        print(f"\n== {suite.name} ==\n{done.stdout}", flush=True)
    number = (
        {k: int(totals.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")} if totals is not None else {}
    )
    failed = number.get("failures", 0) + number.get("errors", 0)
    skipped = number.get("skipped", 0)
    # With a selection of the caller's own (`-k name`), a suite may well hold none of it.
    bad = code not in ((0, _NO_TESTS) if arguments else (0,))
    return Outcome(number.get("tests", 0) - failed - skipped, failed, skipped, seconds, bad)


def together() -> bool:
    """Whether two suites may run at once."""
    return len(os.sched_getaffinity(0)) > 1


def run_all(arguments: list[str]) -> dict[str, Outcome]:
    """Every suite's outcome, in the order of SUITES; two at a time where there are cores for it."""
    at_once = 2 if together() else 1
    with ThreadPoolExecutor(at_once) as pool:
        made = [pool.submit(run, s, arguments, beside=at_once > 1 and s is not SUITES[0]) for s in SUITES]
        return {suite.name: one.result() for suite, one in zip(SUITES, made, strict=True)}


def main() -> int:
    outcomes = run_all(sys.argv[1:])
    width = max(map(len, outcomes))
    print(f"\n{'':{width}}  passed  failed  skipped  seconds")
    for name, o in outcomes.items():
        mark = "  <- FAILED" if o.bad else ""
        print(f"{name:{width}}  {o.passed:6}  {o.failed:6}  {o.skipped:7}  {o.seconds:7.0f}{mark}")
    total = [sum(getattr(o, key) for o in outcomes.values()) for key in ("passed", "failed", "skipped")]
    print(f"\n{total[0]} passed, {total[1]} failed, {total[2]} skipped")
    return int(any(o.bad for o in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
