"""Damages good model files and opens them: each case loads the right numbers or is refused with a CheckpointError.

    python -m tests.support.file_fuzz --cases 20000 [--seed N] [--first 0]

Right numbers: a tensor whose row and bytes the damage did not touch must come back as it was. Two places in a GGUF
move all data without a trace that could be checked: the value of general.alignment and the padding behind the header.
A second opinion comes from the safetensors package, which must accept whatever we load, with the same bytes. A case is
told by seed and number alone. Prints one JSON object; the exit code is 1 when anything failed.
"""

import argparse
import contextlib
import json
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import safetensors
import torch

from moe_lab.errors import CheckpointError, LabError
from moe_lab.formats import QuantTensor
from moe_lab.open import Checkpoint
from tests.support.file_mutations import Mutation, mutate
from tests.support.fuzz_models import Model, models

HANG_S, EXTRA_BYTES = 5, 1 << 30


class Hang(BaseException):
    """A case took longer than HANG_S."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr, flush=True)
    torch.set_num_threads(1)
    report = fuzz(options.seed, range(options.first, options.first + options.cases))
    print(json.dumps(report, indent=1))
    return int(bool(report["failures"]))


def fuzz(seed: int, cases: range) -> dict[str, Any]:
    """Run the cases; how many loaded, were refused and why, and every failure."""
    counts, reasons, failures = Counter(), Counter(), []
    slowest, start = 0.0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        benches = [Bench(model, Path(folder) / model.name) for model in models()]
        _limit_memory()
        signal.signal(signal.SIGALRM, _hang)
        for number in cases:
            rng = random.Random(f"{seed}:{number}")
            bench = rng.choice(benches)
            before = time.perf_counter()
            try:
                signal.setitimer(signal.ITIMER_REAL, HANG_S)
                outcome = bench.case(rng)
            except CheckpointError as error:
                outcome = "refused"
                reasons[error.reason] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                outcome = "failed"
                told = f"{type(error).__name__}: {error}"[:600]
                failures.append({"case": number, "model": bench.model.name, "mutation": bench.about, "what": told})
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                bench.restore()
            counts[outcome] += 1
            slowest = max(slowest, time.perf_counter() - before)
    return {
        "seed": seed,
        "cases": len(cases),
        **{name: counts[name] for name in ("loaded", "refused", "failed")},
        "seconds": round(time.perf_counter() - start, 1),
        "slowest_ms": round(slowest * 1000, 1),
        "reasons": dict(reasons.most_common()),
        "failures": failures[:20],
    }


class Bench:
    """A good model in a folder, one of its files damaged at a time."""

    def __init__(self, model: Model, folder: Path) -> None:
        folder.mkdir()
        self.model, self.folder = model, folder
        self.about, self._damaged = "", ""
        model.write(folder)
        with model.open(folder) as file:
            self.good = {name: file.raw(name) for name in file.tensors}
            self.types = {name: _type_of(file, name) for name in file.tensors}
            self.places = {name: (t.file.name, t.offset, t.nbytes or 0) for name, t in file.tensors.items()}

    def case(self, rng: random.Random) -> str:
        """One mutation, opened and read. "loaded"; CheckpointError when refused, AssertionError for wrong numbers."""
        self._damaged = rng.choice(list(self.model.files))
        data = self.model.files[self._damaged]
        end = self.model.heads.get(self._damaged, (len(data), len(data)))[1]
        mutation = mutate(rng, data, end)
        self.about = f"{mutation.kind} of {self._damaged} at {mutation.first}..{mutation.last}"
        (self.folder / self._damaged).write_bytes(mutation.data)
        with self.model.open(self.folder) as file:
            for name in file.tensors:
                file.raw(name)
            self._check_untouched(file, mutation)
            if self._damaged in ("m.safetensors", "model.safetensors"):  # no shard: it holds the whole model
                _check_against_package(file, mutation.data)
            refused = [error for name in file.tensors if (error := _refusal(file, name)) is not None]
            if not refused:
                _build_layers(file)
        if refused:
            raise refused[0]
        return "loaded"

    def restore(self) -> None:
        """Put the damaged file back."""
        if self._damaged:
            (self.folder / self._damaged).write_bytes(self.model.files[self._damaged])

    def _check_untouched(self, file: Checkpoint, mutation: Mutation) -> None:
        if self.model.name == "gguf" and b"general.alignment\x04\0\0\0\x20\0\0\0" not in mutation.data:
            return
        for name in self.good.keys() & file.tensors.keys():
            if not self._touched(name, mutation):
                assert torch.equal(file.raw(name), self.good[name]), f"{name!r} has other bytes"
                assert file.tensors[name].shape == self.types[name][0], f"{name!r} has another shape"

    def _touched(self, name: str, mutation: Mutation) -> bool:
        where, offset, nbytes = self.places[name]
        if where != self._damaged:
            return False
        if self.model.rows[name] not in mutation.data:
            return True
        end, start = self.model.heads[where]
        if not mutation.moved:
            return mutation.first < offset + nbytes and mutation.last > offset
        return mutation.first >= end and (mutation.first < start or mutation.first < offset + nbytes)


def _refusal(file: Checkpoint, name: str) -> CheckpointError | None:
    try:
        read = file.read(name)
    except CheckpointError as error:
        return error
    assert isinstance(read, torch.Tensor | QuantTensor)
    return None


def _build_layers(file: Checkpoint) -> None:
    """A layer is made or refused; what the lab cannot compute with may be a plain LabError here."""
    for layer in file.moe_layers:
        with contextlib.suppress(LabError):
            file.layer(layer)


def _type_of(file: Checkpoint, name: str) -> tuple[tuple[int, ...], str]:
    return file.tensors[name].shape, file.tensors[name].dtype


def _check_against_package(file: Checkpoint, data: bytes) -> None:
    try:
        theirs = dict(safetensors.deserialize(data))
    except safetensors.SafetensorError as error:
        if "FNUZ" in str(error):
            return
        raise AssertionError(f"we load what the package refuses: {error}") from None
    assert set(theirs) == set(file.tensors), "other names than the package's"
    for name, facts in theirs.items():
        assert bytes(facts["data"]) == file.raw(name).numpy().tobytes(), f"{name!r} has other bytes than the package's"
        assert tuple(facts["shape"]) == file.tensors[name].shape, f"{name!r} has another shape than the package's"


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + EXTRA_BYTES, hard))


def _hang(*_: object) -> NoReturn:
    raise Hang(f"more than {HANG_S} s")


if __name__ == "__main__":
    sys.exit(main())
