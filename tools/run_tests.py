"""`make test`: the suites that need no GPU, one summary, one exit code. Further arguments go to pytest.

Three processes, since two settings hold for a whole process: the fault tests run without the annotation checks (which
would speak before our own error messages do), and the kernel tests run with Triton's interpreter switched on.
"""

import os
import subprocess
import sys
import time
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


SUITES = (
    Suite(
        "units, oracles, notebooks, pages",
        ("tests/unit", "tests/oracles", "tests/notebooks", "tests/ui"),
        ("--jaxtyping-packages=moe_lab,moe_lab_kernels,typecheck.check",),
    ),
    Suite("faults", ("tests/faults",)),
    Suite("kernels in the interpreter", ("tests/kernels",), environment={"TRITON_INTERPRET": "1"}),
)


@dataclass(frozen=True)
class Outcome:
    """Counts of one suite; `bad`: pytest said no, or found nothing to run."""

    passed: int
    failed: int
    skipped: int
    seconds: float
    bad: bool


def run(suite: Suite, arguments: list[str]) -> Outcome:
    """Run one suite, its output going straight to the terminal."""
    print(f"\n== {suite.name} ==", flush=True)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | suite.environment
    with TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "--durations=5", f"--junitxml={counts}"]
        start = time.perf_counter()
        code = subprocess.run(
            [*command, *suite.options, *suite.folders, *arguments], cwd=ROOT, env=environment
        ).returncode
        seconds = time.perf_counter() - start
        totals = ElementTree.parse(counts).getroot().find("testsuite") if counts.exists() else None
    number = (
        {k: int(totals.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")} if totals is not None else {}
    )
    failed = number.get("failures", 0) + number.get("errors", 0)
    skipped = number.get("skipped", 0)
    # With a selection of the caller's own (`-k name`), a suite may well hold none of it.
    bad = code not in ((0, _NO_TESTS) if arguments else (0,))
    return Outcome(number.get("tests", 0) - failed - skipped, failed, skipped, seconds, bad)


def main() -> int:
    outcomes = {suite.name: run(suite, sys.argv[1:]) for suite in SUITES}
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
