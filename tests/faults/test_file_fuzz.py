"""Damaged model files: loaded right or refused, never a crash, a hang, another exception or wrong numbers."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from moe_lab.checkpoint import gguf_header
from tests.support import file_fuzz
from tests.support.file_mutations import Mutation
from tests.support.fuzz_models import models

ROOT = Path(__file__).resolve().parents[2]
# One seed here, so that a change of the code is judged by the cases of before; `make fuzz` draws a new one each time.
SEED, CASES = 4, 2000


def test_two_thousand_cases() -> None:
    command = [sys.executable, "-m", "tests.support.file_fuzz", "--seed", str(SEED), "--cases", str(CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout, f"died with {done.returncode}: {done.stderr[-2000:]}"
    print(done.stderr, done.stdout)
    report = json.loads(done.stdout)
    assert not report["failures"]
    assert (done.returncode, report["failed"], report["cases"]) == (0, 0, CASES)
    # Both answers are common and refusals come of many checks, or the damage would be too coarse to tell anything.
    assert report["loaded"] > 100
    assert report["refused"] > 1000
    assert len(report["reasons"]) > 12


def test_wrong_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tensor count one too small moved all data once, before padding and tail were looked at."""
    good = next(model for model in models() if model.name == "gguf")
    bench = file_fuzz.Bench(good, tmp_path / "gguf")
    data = bytearray(good.files["m.gguf"])
    data[8] -= 1
    monkeypatch.setattr(file_fuzz, "mutate", lambda *_: Mutation(bytes(data), 8, 9, False, "step"))
    with pytest.raises(gguf_header.CheckpointError):
        bench.case(random.Random(0))
    for check in ("_check_padding", "_check_tail"):
        monkeypatch.setattr(gguf_header, check, lambda *_: None)
    with pytest.raises(AssertionError, match="other bytes"):
        bench.case(random.Random(0))
