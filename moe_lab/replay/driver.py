"""The driver: every MoE layer of a model, step by step, as decoding would call them, with a record of all of it.

Nothing between the layers runs (no attention, no residual): each layer gets its recorded input, or a trace's picks.
Times are therefore those of the MoE layers alone, and hide less reading than a whole model would.
"""

import resource
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from inspect import signature
from itertools import zip_longest
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from moe_lab.arms import Arm
from moe_lab.checks import wants, wants_whole
from moe_lab.errors import LabError, LabTypeError
from moe_lab.layer import MoELayer, Options
from moe_lab.open import Checkpoint
from moe_lab.replay.feeds import Feed, Given, feed_of
from moe_lab.replay.ledger import ledger
from moe_lab.replay.rows import Call, table
from moe_lab.replay.stalls import stalls
from moe_lab.replay.story import Story, tell
from moe_lab.replay.watch import LEVELS, TIMED, Level, anchor_on, watching
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.events import EventLog
from moe_lab.stream.prediction import Successor, as_prefetch, check_widths
from moe_lab.stream.provider import StreamedExperts
from moe_lab.system.devices import resolve_device
from moe_lab.timing import EVENTS
from moe_lab.trace import RoutingTrace

if TYPE_CHECKING:
    import pandas as pd

MOST_EVENTS = 1 << 18  # 19 MB: some ten thousand calls of a layer
TIMED_A_CALL = 24  # a device's events that one call takes, two phases of fetching and computing among them


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """What a replay left: its calls, the story of its cache, and what was replayed.

    `step_ms`: wall time of each step, with all that lies between the layers' calls: its rows' wall_ms and between_ms,
    added up. `digest`: SHA-256 of all outputs in
    order where it was asked for. `anchor`: on a GPU at level 2 and above, an event and the host's time (ns) when it had
    happened. `profile`: torch's profiler at level 3. `shares`: the slots that each layer could use.
    """

    calls: list[Call]
    story: Story
    step_ms: list[float]
    level: Level
    about: str
    layers: tuple[int, ...]
    digest: str | None = None
    anchor: tuple[Any, int] | None = None
    profile: Any = None
    shares: Mapping[int, range] = field(default_factory=dict)

    @property
    def table(self) -> "pd.DataFrame":
        """A row a (step, layer): see `moe_lab.replay.rows`."""
        return table(self.calls, self.story, str(self.level))

    @property
    def stalls(self) -> "pd.DataFrame":
        """A row for each expert that was waited for, with its cause: see `moe_lab.replay.stalls`."""
        return stalls(self.story, self.shares)

    @property
    def ledger(self) -> "pd.DataFrame":
        """A row for each expert that was read ahead, and what became of it: see `moe_lab.replay.ledger`."""
        return ledger(self.story)

    def __repr__(self) -> str:
        lost = f", {self.story.lost} events lost" if self.story.lost else ""
        return (
            f"Recording({len(self.step_ms)} steps of {len(self.layers)} layers, {self.about}, level {self.level}{lost})"
        )


def replay(
    ckpt: Checkpoint,
    trace_or_activations: Given | None = None,
    *,
    arm: str | Arm = "gemv",
    cache: ExpertCache | None = None,
    options: Options | None = None,
    level: Level = 1,
    **how: Any,
) -> "pd.DataFrame":
    """Run all MoE layers of `ckpt` on recorded inputs, or on a trace's picks: a row a (step, layer).

    Columns and clocks: `moe_lab.replay.rows`. `cache`: experts are read through it (None: all resident). `level`: 0
    takes no times but the wall's, 1 host times and what the cache did, 2 also a GPU's events, 3 also torch's profiler,
    "S" waits for the device at each phase's end, which destroys all overlap. More options: `moe_lab.replay.run`.
    """
    if unknown := [name for name in how if name not in signature(run).parameters]:
        known = ", ".join(name for name, one in signature(run).parameters.items() if one.kind is one.KEYWORD_ONLY)
        raise LabTypeError(f"lab.replay takes no {unknown[0]!r}; it takes {known}.")
    about: dict[str, Any] = {"arm": arm, "cache": cache, "options": options, "level": level, **how}
    return run(ckpt, trace_or_activations, **about).table


def run(
    ckpt: Checkpoint,
    given: Given | None = None,
    *,
    arm: str | Arm = "gemv",
    cache: ExpertCache | None = None,
    options: Options | None = None,
    level: Level = 1,
    tokens: int | None = None,
    step_tokens: int = 1,
    layers: Sequence[int] | None = None,
    device: str | torch.device = "cpu",
    forecast: RoutingTrace | None = None,
    digest: bool = False,
    seed: int = 0,
    most_events: int = MOST_EVENTS,
    log: EventLog | None = None,
) -> Recording:
    """As `replay`, with everything that was recorded.

    `given`: Activations (the layers' own routers pick), a RoutingTrace (its picks; rows are seeded noise), None: the
    recording beside the model. `tokens`: the first of them alone; `step_tokens`: served together, as a batch is;
    `layers`: these alone. `forecast`: before each layer the experts that this trace names for the next one begin to be
    read: the trace itself is perfect prediction, `lab.caching.previous_token(trace)` a control. LabError for what
    cannot be replayed.
    """
    asked: dict[str, Any] = {"layers": layers, "tokens": tokens, "step_tokens": step_tokens, "seed": seed}
    drive = prepare(ckpt, given, arm=arm, cache=cache, options=options, device=device, forecast=forecast, **asked)
    wants("log", log, (EventLog, NoneType), "an EventLog, or None")
    drive.log = EventLog(wants_whole("most_events", most_events, 1)) if log is None else log
    drive.digest = sha256() if digest else None
    check_level(level)
    with watching(level, cache, drive.log) as profile:
        for step in range(drive.feed.steps):
            drive.step(step, level)
    anchor = anchor_on(drive.device) if level in TIMED else None
    feed, found = drive.feed, None if drive.digest is None else drive.digest.hexdigest()
    about = f"{feed.about}, {feed.step_tokens} a step"
    story = tell(drive.log.table(), drive.log.lost)
    if story.lost:
        warnings.warn(
            f"lab.replay: {story.lost} of the cache's events did not fit its log, so that counts and waits of the "
            f"first steps are too small; raise most_events ({drive.log.most}).",
            stacklevel=2,
        )
    shares = {} if cache is None else _shares(cache, feed.layers)
    return Recording(drive.calls, story, drive.step_ms, level, about, feed.layers, found, anchor, profile, shares)


def check_level(level: Level) -> None:
    """LabError for what is no level."""
    if type(level) not in (int, str) or level not in LEVELS:  # True and 1.0 equal 1
        raise LabError(f"lab.replay: level={level!r}; wanted {', '.join(map(repr, LEVELS))}.")


def prepare(
    ckpt: Checkpoint,
    given: Given | None,
    *,
    arm: str | Arm = "gemv",
    cache: ExpertCache | None = None,
    options: Options | None = None,
    device: str | torch.device = "cpu",
    forecast: RoutingTrace | None = None,
    **asked: Any,
) -> "Drive":
    """A replay ready for its first step; arguments as `run` takes them, `asked` goes to `feed_of`."""
    wants("ckpt", ckpt, Checkpoint, "an open checkpoint, as lab.open makes it")
    wants("cache", cache, (ExpertCache, NoneType), "an ExpertCache, or None: all experts resident")
    wants("options", options, (Options, NoneType), "moe_lab.Options, or None")
    wants("forecast", forecast, (RoutingTrace, NoneType), "a RoutingTrace of the tokens that are replayed, or None")
    if options is not None:
        check_widths(as_prefetch(options.prefetch), ckpt.moe_layers)
    where = resolve_device(device)
    feed = feed_of(ckpt, given, device=where, **asked)
    made = _layers(ckpt, feed.layers, where, cache)
    ahead = None if forecast is None else _forecast(forecast, feed, made)
    return Drive(feed, made, arm, options or Options(), ahead)


def _shares(cache: ExpertCache, layers: Sequence[int]) -> dict[int, range]:
    """The slots of each layer: the same ones, or with a cache split by layer each its own."""
    apart = len({id(policy) for policy in cache.policies.values()}) > 1
    first, shares = 0, {}
    for layer in layers:
        count = cache.slots_for(layer)
        shares[layer] = range(first, first + count)
        first += count if apart else 0
    return shares


def _layers(
    ckpt: Checkpoint, numbers: Sequence[int], device: torch.device, cache: ExpertCache | None
) -> dict[int, MoELayer]:
    """The layers, each followed by the next one that is replayed: nothing is read ahead for a layer left out."""
    made = {n: ckpt.layer(n, device=device, cache=cache) for n in numbers}
    for here, there in zip_longest(numbers, numbers[1:]):
        made[here].successor = Successor.none() if there is None else Successor.of(made[there])
    return made


@dataclass(slots=True)
class Drive:
    """One step after another, and what they left."""

    feed: Feed
    layers: dict[int, MoELayer]
    arm: str | Arm
    options: Options
    ahead: Callable[[int, int], None] | None
    log: EventLog = field(default_factory=lambda: EventLog(MOST_EVENTS))
    digest: Any = None
    calls: list[Call] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    busy_ms: list[float] = field(default_factory=list)  # processor time of the calling thread

    @property
    def device(self) -> torch.device:
        """Where the layers compute."""
        return next(iter(self.layers.values())).device

    def step(self, number: int, level: Level) -> None:
        """Every layer once, and the wait for the device."""
        self.log.step = number
        if self.device.type == "cuda" and (events := EVENTS.get()) is not None:
            stream = torch.cuda.current_stream(self.device)
            events.fill(TIMED_A_CALL * len(self.layers), stream)
            stream.synchronize()  # a hundred events recorded before the step are not work of its first call
        options = replace(self.options, sync_timing=True) if level == "S" else self.options
        outs: list[torch.Tensor] = []
        begin, busy = time.perf_counter_ns(), time.thread_time_ns()
        last = begin
        for place, layer in enumerate(self.feed.layers):
            if self.ahead is not None and place + 1 < len(self.feed.layers):
                self.ahead(number, self.feed.layers[place + 1])
            outs.append(self._call(number, layer, options, last))
            last = self.calls[-1].end_ns
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            last = time.perf_counter_ns()
            self.calls[-1] = replace(self.calls[-1], drained_ns=last)
        busy, end = time.thread_time_ns() - busy, time.perf_counter_ns()
        self.calls[-1] = replace(self.calls[-1], between_ns=self.calls[-1].between_ns + end - last)
        self.step_ms.append((end - begin) / 1e6)
        self.busy_ms.append(busy / 1e6)
        if self.digest is not None:
            for out in outs:  # outside the clock: it brings the outputs to the host
                self.digest.update(out.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())

    def _call(self, step: int, number: int, options: Options, last_ns: int) -> torch.Tensor:
        moe = self.layers[number]
        x, routing = self.feed.x(step, number), self.feed.routing(step, moe)
        usage, cpu = resource.getrusage(resource.RUSAGE_SELF), time.process_time_ns()
        begin = time.perf_counter_ns()
        y = moe(x, self.arm, routing=routing, options=options)
        end = time.perf_counter_ns()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - usage.ru_majflt
        cpu = time.process_time_ns() - cpu
        about: dict[str, int] = {"cpu_ns": cpu, "major_faults": faults, "between_ns": begin - last_ns}
        self.calls.append(Call(step, number, begin, end, y.timing, **about))
        return y.out


def _forecast(forecast: RoutingTrace, feed: Feed, layers: dict[int, MoELayer]) -> Callable[[int, int], None]:
    """Reads ahead what `forecast` names. LabError where it is not about the same tokens, or nothing is streamed."""
    if forecast.tokens < feed.tokens or not set(feed.layers) <= set(forecast.layers):
        raise LabError(
            f"lab.replay: the forecast has {forecast.tokens} tokens and layers {list(forecast.layers)}; the replay "
            f"{feed.tokens} and {list(feed.layers)}."
        )

    for number, moe in layers.items():
        if forecast.width != (width := moe.spec.router.width):
            raise LabError(
                f"lab.replay: the forecast names experts among R={forecast.width}, layer {number} routes among "
                f"R={width}: it is of another model."
            )

    def ahead(step: int, number: int) -> None:
        moe = layers[number]
        if not isinstance(moe.experts, StreamedExperts):
            raise LabError("lab.replay: forecast= reads ahead, and these experts are resident: give a cache.")
        picked = forecast.layer(number)[feed.span(step)]
        named = [int(e) for e in dict.fromkeys(picked.T.ravel().tolist()) if e < moe.spec.num_experts]
        moe.experts.cache.prefetch(moe.experts.source, number, named)

    return ahead
