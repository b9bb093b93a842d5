"""The table of variants: what is launched, recorded; what is known, in a file; what is left to be compiled."""

import csv
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import triton

from moe_lab_kernels.backend import Launch, record_launches
from moe_lab_kernels.launch.ahead import Job, job_of, pool
from moe_lab_kernels.launch.table import looked_up_for, shipped_devices
from tools.variants import arms, others
from tools.variants.facts import Machine, machine, name_of, short_name
from tools.variants.sources import digest

Key = tuple[str, str]
TARGET = "sm_90"


@dataclass(frozen=True, slots=True)
class Found:
    """A variant that something launches: a launch of it, and what launched it first."""

    job: Job
    used_by: str


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the file. `source`: a hash of the kernel's text; `spill_bytes` are a thread's."""

    kernel: str
    variant: str
    used_by: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    code_bytes: int
    source: str
    triton: str
    target: str = TARGET

    @property
    def key(self) -> Key:
        """What the file is sorted by."""
        return self.kernel, self.variant

    @property
    def machine(self) -> Machine:
        """What the compiler made."""
        return Machine(self.registers, self.shared_bytes, self.spill_bytes, self.code_bytes)


def found() -> dict[Key, Found]:
    """Every distinct variant that arms and the launchers around them start, on a device without a launch table and on
    those of the shipped tables."""
    seen: dict[Key, Found] = {}
    for label, made in _recorded():
        for launch in made:
            job = job_of(launch)
            seen.setdefault((short_name(job), name_of(job)), Found(job, label))
    return dict(sorted(seen.items()))


def _recorded() -> Iterator[tuple[str, list[Launch]]]:
    for device in (None, *shipped_devices()):
        with looked_up_for(device):
            for case in arms.cases():
                if arms.serves(case):
                    with record_launches() as made:
                        arms.run(case)
                    yield case.label, made
    for label, call in others.calls():
        with record_launches() as made:
            call()
        yield label, made


def compiled(wanted: Mapping[Key, Found], processes: int | None = None) -> Iterator[Row]:
    """The rows of these variants as they come; largest kernels first, so that no process ends long after the others."""
    order = sorted(wanted, key=lambda key: (_weight(key[0]), key))
    if not order:
        return
    with pool(processes) as compilers:
        made = compilers.map(machine, [wanted[key].job for key in order])
        for key, facts in zip(order, made, strict=True):
            one = wanted[key]
            text, about = digest(one.job.function()), asdict(facts)
            yield Row(*key, one.used_by, **about, source=text, triton=triton.__version__)


def _weight(kernel: str) -> int:
    heavy = ("gemv.mlp", "mmq.mmq", "gemv", "grouped")
    return next((i for i, name in enumerate(heavy) if kernel.startswith(name)), len(heavy))


def is_current(row: Row, one: Found) -> bool:
    """Whether the same compiler was given the same text, so that it would make the same again."""
    return (row.source, row.triton) == (digest(one.job.function()), triton.__version__)


def sampled(keys: Iterable[Key], every: int) -> set[Key]:
    """About one of `every` variants of each kernel, the same ones each time."""
    return {k for k in keys if int(hashlib.sha256("".join(k).encode()).hexdigest(), 16) % every == 0}


def read(path: Path) -> dict[Key, Row]:
    """The file's rows; none where there is no file."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = [{f.name: f.type(line[f.name]) for f in fields(Row)} for line in csv.DictReader(file)]  # type: ignore[operator]
    return {(row["kernel"], row["variant"]): Row(**row) for row in rows}


def write(path: Path, rows: Mapping[Key, Row]) -> None:
    """All rows, sorted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, [f.name for f in fields(Row)])
        out.writeheader()
        out.writerows(asdict(row) for _, row in sorted(rows.items()))
