"""One measurement: what was measured, in which case, and what its status lets it hold.

A wrong result has no speed, and an arm that did not run has no error: `Status` decides, `Record` refuses the rest.
Knows nothing about clocks, files or machines.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np

from moe_lab.errors import LabError, LabTypeError


class Status(StrEnum):
    """How a measurement ended: right and timed, wrong, refused by the arm, out of memory, or any other exception."""

    PASSED = "PASSED"
    INCORRECT = "INCORRECT"
    UNSUPPORTED = "UNSUPPORTED"
    OOM = "OOM"
    ERROR = "ERROR"


# Status -> (what it must hold, what it may hold besides); a record that holds anything else is refused.
HOLDS: dict[Status, tuple[frozenset[str], frozenset[str]]] = {
    Status.PASSED: (frozenset({"spread", "error", "error_measure", "method"}), frozenset({"predicted", "floor"})),
    Status.INCORRECT: (frozenset({"error", "error_measure", "reason"}), frozenset({"method"})),
    **dict.fromkeys((Status.UNSUPPORTED, Status.OOM, Status.ERROR), (frozenset({"reason"}), frozenset())),
}
_HELD = ("spread", "error", "error_measure", "predicted", "floor", "method", "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The measured situation. Sizes D, F, E, K, T are None where the thing has none.

    `workload` says which inputs and picks ("uniform", "zipf", a recording), `model` whose shape, `state` "cold"
    (weights come from memory: a rotation larger than the L2), "warm" (the same weights again) or "" for neither.
    """

    workload: str
    model: str = ""
    d_model: SupportsIndex | None = None
    d_expert: SupportsIndex | None = None
    experts: SupportsIndex | None = None
    top_k: SupportsIndex | None = None
    tokens: SupportsIndex | None = None
    state: str = ""

    def __post_init__(self) -> None:
        _need_texts(self, ("workload", "model", "state"), "a case")
        for name in SIZES:
            size = getattr(self, name)
            if size is not None and (not _is_whole(size) or size < 0):
                raise LabError(f"a case's {name} is {size!r}; wanted a whole number, 0 or more, or None.")
        _plain(self, SIZES, int)

    @property
    def label(self) -> str:
        """Short text for tables and plots: model (or shape), workload, T and state."""
        shape = [f"{letter}={size}" for letter, size in zip("DFEK", self.shape, strict=True) if size is not None]
        tokens = [] if self.tokens is None else [f"T={self.tokens}"]
        return " ".join(part for part in (self.model or " ".join(shape), self.workload, *tokens, self.state) if part)

    @property
    def shape(self) -> tuple[SupportsIndex | None, ...]:
        """D, F, E, K."""
        return (self.d_model, self.d_expert, self.experts, self.top_k)


SIZES = ("d_model", "d_expert", "experts", "top_k", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A measured distribution in the unit of its record: percentiles over `n` repetitions, and these where kept.

    Numbers are finite and not negative, percentiles in order. `iqr` is the 75th minus the 25th percentile.
    """

    p20: float
    p50: float
    p80: float
    n: int
    p95: float | None = None
    iqr: float | None = None
    samples: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("p20", "p50", "p80", "p95", "iqr"):
            value = getattr(self, name)
            if (value is not None or name in ("p20", "p50", "p80")) and not _is_amount(value):
                raise LabError(f"a spread's {name} is {value!r}; wanted a finite number, 0 or more.")
        if not _is_whole(self.n) or self.n < 1:
            raise LabError(f"a spread's n is {self.n!r}; wanted the number of repetitions, 1 or more.")
        if not self.p20 <= self.p50 <= self.p80 <= (self.p80 if self.p95 is None else self.p95):
            raise LabError(
                f"a spread wants p20 <= p50 <= p80 <= p95, got {self.p20}, {self.p50}, {self.p80}, {self.p95}."
            )
        if self.samples:
            self._check_samples()
        _plain(self, ("p20", "p50", "p80", "p95", "iqr"), float)
        _plain(self, ("n",), int)

    def _check_samples(self) -> None:
        if len(self.samples) != self.n:
            raise LabError(f"a spread over n={self.n} repetitions came with {len(self.samples)} samples.")
        # Builtins: on 60 samples numpy's four calls take ten times as long, which loading 10,000 records would notice.
        try:
            low, high, total = min(self.samples), max(self.samples), float(sum(self.samples))
        except (TypeError, ValueError) as e:
            raise LabTypeError(f"a spread's samples are no numbers: {e}") from e
        if low < 0 or not math.isfinite(total):
            raise LabError(f"a spread's samples run from {low} to {high}; wanted finite numbers, 0 or more.")
        if not low <= self.p50 <= high:
            raise LabError(f"a spread's p50 is {self.p50}, outside its samples; Spread.of(samples) computes it.")

    @classmethod
    def of(cls, samples: Iterable[SupportsFloat]) -> "Spread":
        """From the repetitions themselves; percentiles are interpolated linearly. LabError for none."""
        kept = tuple(float(value) for value in samples)
        if not kept:
            raise LabError("a spread of no samples: nothing was measured.")
        p20, p25, p50, p75, p80, p95 = np.quantile(kept, (0.2, 0.25, 0.5, 0.75, 0.8, 0.95)).tolist()
        return cls(p20=p20, p50=p50, p80=p80, p95=p95, iqr=p75 - p25, n=len(kept), samples=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measurement of one arm in one case.

    `spread`, `predicted` and `floor` are in `unit` (s, ms, us and ns are times; a unit ending in "/s" is a rate).
    `error` is how far the result lay from the truth, `error_measure` how that was taken. `method` names clock and
    rotation. `layout`: how the experts lay; `tiles`: the kernels with the launch parameters that they ran with.

    PASSED holds spread, error, error_measure and method, and may hold predicted and floor. INCORRECT holds error,
    error_measure and a reason, no time. UNSUPPORTED, OOM and ERROR hold a reason. LabError for anything else.
    """

    what: str
    case: Case
    arm: str
    format: str
    backend: str
    status: Status
    shared_arm: str = ""
    metric: str = "time"
    unit: str = "ms"
    spread: Spread | None = None
    error: float | None = None
    error_measure: str = ""
    predicted: float | None = None
    floor: float | None = None
    method: str = ""
    reason: str = ""
    layout: str = ""
    tiles: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.case, Case) or not isinstance(self.spread, Spread | None):
            raise LabTypeError(
                f"a record wants a Case and a Spread or None, got {type(self.case).__name__} and "
                f"{type(self.spread).__name__}."
            )
        _need_texts(self, TEXTS, "a record")
        for name in ("what", "arm", "backend", "metric", "unit"):
            if not getattr(self, name):
                raise LabError(f"a record's {name} is empty; every measurement names it.")
        if not isinstance(self.status, Status):
            raise LabTypeError(f"{self}: its status is {self.status!r}; wanted one of {', '.join(Status)}.")
        self._check_status()
        self._check_numbers()
        _plain(self, ("error", "predicted", "floor"), float)

    def __str__(self) -> str:
        return f"record {self.what} of {self.arm!r} in {self.case.label!r}"

    def _check_status(self) -> None:
        must, may = HOLDS[self.status]
        held = {name for name in _HELD if (value := getattr(self, name)) is not None and value != ""}
        if must <= held <= must | may:
            return
        missing, extra = sorted(must - held), sorted(held - must - may)
        if extra:
            raise LabError(f"{self}: {self.status} holds no {', '.join(extra)}; it holds {', '.join(sorted(must))}.")
        raise LabError(f"{self}: {self.status} needs {', '.join(missing)}.")

    def _check_numbers(self) -> None:
        wrong = self.status is Status.INCORRECT  # the error of a wrong result may be anything, NaN too
        if self.error is not None and not (isinstance(self.error, Real) if wrong else _is_amount(self.error)):
            raise LabError(f"{self}: its error is {self.error!r}; {self.status} wants a finite number, 0 or more.")
        for name in ("predicted", "floor"):
            value = getattr(self, name)
            if value is not None and not _is_amount(value):
                raise LabError(f"{self}: its {name} is {value!r}; wanted a finite number, 0 or more, or None.")


TEXTS = (
    "what", "arm", "format", "backend", "shared_arm", "metric", "unit", "error_measure", "method", "reason", "layout",
    "tiles",
)  # fmt: skip
CASE = tuple(field.name for field in fields(Case))


def _is_amount(value: Any) -> bool:
    if type(value) is not float and (not isinstance(value, Real) or isinstance(value, bool)):
        return False
    return 0 <= float(value) < math.inf


def _is_whole(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _plain(owner: Any, names: Iterable[str], kind: type) -> None:
    """Python's own numbers in place of numpy's, which JSON does not take."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and type(value) is not kind:
            object.__setattr__(owner, name, kind(value))


def _need_texts(owner: Any, names: Iterable[str], what: str) -> None:
    for name in names:
        if not isinstance(getattr(owner, name), str):
            raise LabTypeError(f"{what}'s {name} is {getattr(owner, name)!r}; wanted a text.")
