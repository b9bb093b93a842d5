"""Where one layer call's time went: route, fetch, compute, other.

The columns mean the same in every arm, on every device:
  route_ms    logits, picks and the plan, until the host knows them
  fetch_ms    time in which work stood still for want of expert bytes (reads and, on a GPU, their copy)
  compute_ms  experts, shared expert and the weighted sum
  other_ms    wall minus the three; never folded into compute
On CPU the clock is the host's (perf_counter_ns, the work is synchronous). On CUDA each phase is bracketed by events on
the current stream and read only when a *_ms attribute is asked for: reading waits for the call to finish, timing does
not. `with record() as rec` collects every call made inside it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from moe_lab.card import card
from moe_lab.errors import LabError, MissingExtra
from moe_lab.system.devices import current_stream
from moe_lab.system.devices import record as record_on
from moe_lab.trace import RoutingTrace, TraceWriter
from moe_lab_kernels.backend import LaunchCount

if TYPE_CHECKING:
    import pandas as pd

Phase = Literal["route", "fetch", "compute"]
PHASES: tuple[Phase, ...] = ("route", "fetch", "compute")


# How much a call notes (see `moe_lab.replay`): 0 nothing, 1 host stamps alone, 2 also device events, for parts of
# phases as well. None: a call outside a replay; device events for phases alone.
LEVEL: ContextVar[int | None] = ContextVar("moe_lab_timing_level", default=None)


class EventPool:
    """Events of a device made beforehand. Each is handed out once: a record keeps the ones it was given."""

    def __init__(self) -> None:
        self._free: list[Any] = []

    def fill(self, count: int, stream: Any) -> None:
        """Have `count` at hand; an event comes into being when it is recorded first."""
        while len(self._free) < count:
            event = torch.cuda.Event(enable_timing=True)
            event.record(stream)
            self._free.append(event)

    def take(self) -> Any:
        """One at hand, else a new one."""
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)


# Where a replay's clocks take their events. None: each makes its own.
EVENTS: ContextVar[EventPool | None] = ContextVar("moe_lab_timing_events", default=None)


@dataclass(slots=True)  # not frozen: that makes a stamp three times as dear
class Stamp:
    """A phase or a part of one: begin and end as the clock has them (events on CUDA), and on the host, in ns."""

    name: str
    begin: Any
    end: Any
    begin_ns: int
    end_ns: int


class PhaseClock:
    """Stamps the phases of one call. Phases must not nest; time in none of them is "other".

    `stamps`: the phases in order; `parts`: marks inside them ("shared", "read_back"). Host times (`begin_ns`, `end_ns`,
    `start_ns`, `end_ns`) are perf_counter_ns: on a GPU they say when work was handed over, not when it ran.
    """

    def __init__(self, device: torch.device) -> None:
        level = LEVEL.get()
        self.device = device
        self._cuda = device.type == "cuda" and level != 1
        self._fine = level is not None
        self._events = EVENTS.get()
        self._stream: Any = current_stream(device) if device.type == "cuda" else None
        self.stamps: list[Stamp] = []
        self.parts: list[Stamp] = []
        self._open = False
        self.end_ns = 0
        self.start_ns = time.perf_counter_ns()
        self._start = self._event(self._stream) if self._cuda else self.start_ns
        self._end: Any = None

    def _event(self, stream: Any) -> Any:
        return record_on(torch.cuda.Event(enable_timing=True) if self._events is None else self._events.take(), stream)

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Time spent inside counts as `name`, also when it ends in an exception."""
        return _Span(self, name, self.stamps, self._stream)

    def part(self, name: str) -> AbstractContextManager[None]:
        """A mark on the current stream inside a phase, noted in a replay alone."""
        if not self._fine:
            return nullcontext()
        return _Span(self, name, self.parts, current_stream(self._stream.device) if self._cuda else None)

    def drain(self) -> None:
        """In a replay, wait here for the device, where the caller would wait a moment later: part "read_back"."""
        if self._fine and self._stream is not None:
            begin_ns = time.perf_counter_ns()
            self._stream.synchronize()
            end_ns = time.perf_counter_ns()
            self.parts.append(Stamp("read_back", begin_ns, end_ns, begin_ns, end_ns))

    def stop(self) -> None:
        """The call is over."""
        self.end_ns = time.perf_counter_ns()
        self._end = self._event(self._stream) if self._cuda else self.end_ns

    def synchronize(self) -> None:
        """Wait for the work so far; on CPU it is already done."""
        if self._stream is not None:
            self._stream.synchronize()

    def read(self) -> dict[str, float]:
        """Milliseconds: one entry a phase and "wall". Waits for the call's device work."""
        if self._end is None:
            raise LabError("the clock is still running: stop() it before reading.")
        if self._cuda:
            self._end.synchronize()
        total: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        for stamp in self.stamps:
            total[stamp.name] += self.between(stamp.begin, stamp.end)
        return {**total, "wall": self.between(self._start, self._end)}

    def between(self, begin: Any, end: Any) -> float:
        """Milliseconds between two times of `stamps`, once the device has reached the later one."""
        return begin.elapsed_time(end) if self._cuda else (end - begin) / 1e6

    def since(self, at: Any) -> float:
        """Milliseconds from the call's begin to a time of `stamps`."""
        return self.between(self._start, at)

    @property
    def on_device(self) -> bool:
        """Whether `stamps` are events of a device; else they are the host's."""
        return self._cuda


class _Span(AbstractContextManager):
    """A phase, or a part of one, being timed; a class of its own, as a generator would cost another microsecond."""

    __slots__ = ("_begin", "_begin_ns", "_clock", "_into", "_name", "_stream")

    def __init__(self, clock: PhaseClock, name: str, into: list[Stamp], stream: Any) -> None:
        self._clock, self._name, self._into, self._stream = clock, name, into, stream

    def __enter__(self) -> None:
        clock = self._clock
        if self._into is clock.stamps:
            if clock._open:
                raise LabError(f"phase {self._name!r} opened inside another phase: phases must not overlap.")
            clock._open = True
        self._begin_ns = time.perf_counter_ns()
        self._begin = clock._event(self._stream) if clock._cuda else self._begin_ns

    def __exit__(self, *_: object) -> None:
        clock, end_ns = self._clock, time.perf_counter_ns()
        end = clock._event(self._stream) if clock._cuda else end_ns
        self._into.append(Stamp(self._name, self._begin, end, self._begin_ns, end_ns))
        if self._into is clock.stamps:
            clock._open = False


class Unclocked(PhaseClock):
    """A call inside a CUDA graph that is being captured, where nothing runs, or at level 0: no time is taken. Reads
    NaN.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Nothing is noted."""
        return nullcontext()

    def part(self, name: str) -> AbstractContextManager[None]:
        """Nothing is noted."""
        return nullcontext()

    def drain(self) -> None:
        """Nothing is waited for."""

    def read(self) -> dict[str, float]:
        """NaN for every entry."""
        return dict.fromkeys((*PHASES, "wall"), float("nan"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One layer call. Times in ms; bytes in bytes.

    `hits`, `misses`: distinct experts asked of the cache (0 and 0 when resident); `bytes_read`: bytes this call
    fetched;
    `weight_bytes`: expert bytes the arithmetic walked over (an expert read once for n rows counts once), as the arm
    counts them: NaN, unknown, where a user's arm counts none. With routing on the device: one read a chunk handed over;
    `submissions`: times work was handed over (1 a wave of experts when batched, 1 a token and wave when not; one more
    where resident experts of a wave were computed while others were read);
    `launches`: Triton kernels started, or on the torch path matrix products of experts; `io_mode`: how the cache reads
    its files (`stream.access`), None when resident.
    `predicted`: the next layer's experts that this call guessed, likeliest first; `prefetched`: how many of them were
    absent; `no_prefetch`: why there is no guess though `Options.prefetch` asked for one.
    `layout`: how the experts lie in memory ("raw", "planar", "tiles"); `tiles`: the kernels by name, each with the
    launch parameters that it was started with ("" on the torch path, which has none).
    """

    clock: PhaseClock = field(repr=False)
    layer: int | None
    arm: str
    shared_arm: str | None
    backend: str
    tokens: int
    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    weight_bytes: int | float = 0
    submissions: int = 0
    launches: int = 0
    io_mode: str | None = None
    predicted: tuple[int, ...] = ()
    prefetched: int = 0
    no_prefetch: str | None = None
    layout: str = "raw"
    kernels: LaunchCount = field(default_factory=LaunchCount, repr=False)

    @property
    def tiles(self) -> str:
        """The launch parameters of every kernel that ran."""
        return self.kernels.tiles

    @property
    def route_ms(self) -> float:
        """Routing and planning."""
        return self.clock.read()["route"]

    @property
    def fetch_ms(self) -> float:
        """Waiting for expert bytes."""
        return self.clock.read()["fetch"]

    @property
    def compute_ms(self) -> float:
        """Experts, shared expert, weighted sum."""
        return self.clock.read()["compute"]

    @property
    def wall_ms(self) -> float:
        """The whole call."""
        return self.clock.read()["wall"]

    @property
    def other_ms(self) -> float:
        """Wall minus the three phases."""
        t = self.clock.read()
        return t["wall"] - t["route"] - t["fetch"] - t["compute"]

    def _repr_html_(self) -> str:
        return card(f"Timing of one call, layer {self.layer}", {k: v for k, v in self.row().items() if k != "layer"})

    def row(self) -> dict[str, Any]:
        """The record as one table row, columns as documented above."""
        t = self.clock.read()
        times = {f"{p}_ms": t[p] for p in PHASES}
        times["other_ms"] = t["wall"] - sum(t[p] for p in PHASES)
        names = ("hits", "misses", "bytes_read", "submissions", "launches", "weight_bytes", "layout", "tiles")
        head = {n: getattr(self, n) for n in ("layer", "arm", "shared_arm", "backend", "tokens")}
        return {**head, **times, "wall_ms": t["wall"], **{n: getattr(self, n) for n in names}, "io_mode": self.io_mode}


@dataclass(frozen=True, slots=True, eq=False)
class _Picks:
    """One call's picks: ids and weights [T, K], margin [T] where asked for."""

    ids: Any
    weights: Any
    margin: Any


class Recorder:
    """Collects the timings and picks of every layer call made inside `record()`."""

    def __init__(self, *, margin: bool = False, writer: TraceWriter | None = None) -> None:
        self._margin, self._writer = margin, writer
        self._calls: list[Timing] = []
        self._picks: dict[int, list[_Picks]] = {}
        self._about: dict[str, Any] = {}

    def add(
        self,
        timing: Timing,
        layer: int | None,
        routing: Any,
        about: dict[str, Any],
        margin: Callable[[], torch.Tensor] | None,
    ) -> None:
        """Called by the layer at the end of a call; `margin` computes it where the layer's own router picked."""
        number = -1 if layer is None else layer
        if self._writer is not None and number in self._picks:
            self.flush()  # the layer comes round again: a step is over
        found = None
        if self._margin:
            found = margin() if margin is not None else torch.full((len(routing.ids),), float("nan"))
        self._picks.setdefault(number, []).append(_Picks(routing.ids, routing.weights, found))
        self._about.update(about)
        if self._writer is None:
            self._calls.append(timing)

    def flush(self) -> None:
        """Hand the step that is over to the file, if there is one."""
        if self._writer is not None and self._picks:
            self._writer.append(self._joined())
            self._picks = {}

    @property
    def timings(self) -> "pd.DataFrame":
        """One row a layer call (see `Timing`)."""
        if self._writer is not None:
            raise LabError("timings are not kept while picks are recorded to a file: their number has no bound.")
        try:
            import pandas as pd
        except ImportError as e:
            raise MissingExtra("pandas", "lab", "rec.timings") from e
        return pd.DataFrame([c.row() for c in self._calls])

    @property
    def trace(self) -> RoutingTrace:
        """The picks as a RoutingTrace; calls of one layer follow one another along the token axis. Recorded to a file,
        they are read back from it once the block is over.
        """
        if self._writer is not None:
            return RoutingTrace.load(self._writer.path)
        if not self._picks:
            raise LabError("nothing was recorded: no layer was called inside record().")
        return self._joined()

    def _joined(self) -> RoutingTrace:
        def arrays(name: str) -> dict[int, Any]:
            calls = {n: [getattr(p, name) for p in picks] for n, picks in self._picks.items()}
            return {n: torch.cat([t.cpu() for t in tensors]).numpy() for n, tensors in calls.items()}

        margin = arrays("margin") if self._margin else {}
        ids, weights = arrays("ids"), arrays("weights")
        shapes = {n: a.shape for n, a in ids.items()}
        if len(set(shapes.values())) > 1:
            raise LabError(f"a trace needs the same tokens and K in every layer, got {shapes}.")
        stacked = np.stack([margin[n] for n in sorted(margin)], 1) if margin else None
        return RoutingTrace.from_layers(ids, weights, margin=stacked, **self._about)


_RECORDERS: ContextVar[tuple[Recorder, ...]] = ContextVar("moe_lab_recorders", default=())


@contextmanager
def record(*, margin: bool = False, to: str | Path | None = None) -> Iterator[Recorder]:
    """Record every layer call made inside the block (also in nested blocks).

    `margin`: also how close each token came to other picks, which runs the router a second time, outside the clock; NaN
    where the call was given its routing. `to`: write the picks to this Parquet file step by step instead of keeping
    them (and no timings): memory for one row group. Every step must then call the same layers, once each, in order.
    """
    with nullcontext() if to is None else TraceWriter(to) as writer:
        recorder = Recorder(margin=margin, writer=writer)
        token = _RECORDERS.set((*_RECORDERS.get(), recorder))
        try:
            yield recorder
        finally:
            _RECORDERS.reset(token)
        recorder.flush()


def emit(
    timing: Timing,
    layer: int | None,
    routing: Any,
    about: dict[str, Any],
    margin: Callable[[], torch.Tensor] | None = None,
) -> None:
    """Hand one finished call to every open recorder."""
    for recorder in _RECORDERS.get():
        recorder.add(timing, layer, routing, about, margin)
