"""What the record itself costs: the same steps at every level, interleaved step by step.

A round runs all tokens once; in each round every token has another level (a Latin square), so after as many rounds as
levels each token was run at each of them, through one cache whose contents at a token are the same in all rounds; every
other square runs the levels backwards.
overhead = median over pairs of (step at the level) / (the same token's step at level 0) - 1; low, high: the order
statistics of the pairs that hold the median in 95 of 100 cases, whatever its distribution (binomial). Twice: for the
wall, and for processor time of the calling thread (busy), which other programs on the machine disturb less. Where both
are noisier than the record is dear, `accounted` says what it comes to by the piece: events and stamps of a step, times
what one of them takes alone on this machine, over the median step at level 0 (NaN at "S" and 3, which do other work).
"""

import time
from collections.abc import Sequence
from math import floor, sqrt
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from moe_lab.checks import wants_whole
from moe_lab.errors import LabError, LabTypeError
from moe_lab.open import Checkpoint
from moe_lab.replay.driver import Drive, check_level, prepare
from moe_lab.replay.feeds import Given
from moe_lab.replay.watch import Level, watching
from moe_lab.simulate.table import frame
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.events import EventLog
from moe_lab.timing import EVENTS, PhaseClock

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    *("level", "pairs", "ms_per_step", "overhead", "low", "high"),
    *("busy_ms_per_step", "busy_overhead", "busy_low", "busy_high"),
    *("events_per_step", "stamps_per_step", "accounted"),
)
HOW = ("arm", "options", "device", "layers", "step_tokens", "forecast", "seed")
Times = dict[Level, list[list[tuple[float, float]]]]


def overhead(
    ckpt: Checkpoint,
    given: Given | None = None,
    *,
    levels: Sequence[Level] = (0, 1, 2),
    slots: int,
    squares: int = 2,
    tokens: int = 16,
    **how: Any,
) -> "pd.DataFrame":
    """A row a level, columns `COLUMNS`. `squares`: times that every token is run at every level; `how`: `HOW`, as `run`
    takes them. LabError without level 0, which the others are compared with, LabTypeError for other options.
    """
    if unknown := sorted(set(how) - set(HOW)):
        raise LabTypeError(
            f"overhead takes no {unknown[0]!r}; it makes a cache of `slots` of its own and hands {', '.join(HOW)} on."
        )
    for level in levels:
        check_level(level)
    if 0 not in levels:
        raise LabError("overhead compares with level 0: add it to levels.")
    wants_whole("squares", squares, 1)
    times: Times = {level: [[] for _ in range(wants_whole("tokens", tokens, 1))] for level in levels}
    noted: dict[Level, list[tuple[int, int]]] = {level: [] for level in levels}
    with ExpertCache(slots=slots) as cache:
        asked: dict[str, Any] = {"layers": None, "step_tokens": 1, "seed": 0, **how}
        drive = prepare(ckpt, given, cache=cache, tokens=tokens, **asked)
        drive.log = EventLog(1 << 14)
        for number in range(-1, squares * len(levels)):  # the first round warms up
            for step in range(drive.feed.steps):
                level = 0 if number < 0 else levels[_turn(step, number, len(levels))]
                with watching(level, cache, drive.log):
                    drive.step(step, level)
                if number >= 0:
                    times[level][step].append((drive.step_ms[-1], drive.busy_ms[-1]))
                    noted[level].append((len(drive.log), _stamps(drive)))
                drive.calls.clear()
                drive.log.clear()
        dear = {level: _alone(level, drive.device) for level in levels}
    base = _pairs(times[0])
    rows = [(*_row(n, _pairs(times[n]), base), *_accounted(noted[n], dear[n], base)) for n in levels]
    return frame(rows, COLUMNS)


def _turn(step: int, number: int, levels: int) -> int:
    """Whose turn a step is in a round. Every other square runs the levels backwards, so that no level always comes
    behind the same one: a step leaves the next one warm or cold caches."""
    return (step + number if number // levels % 2 == 0 else number - step) % levels


def _stamps(drive: Drive) -> int:
    """Phases and parts that the last step's calls noted."""
    return sum(len(call.timing.clock.stamps) + len(call.timing.clock.parts) for call in drive.calls)


def _alone(level: Level, device: torch.device) -> tuple[float, float]:
    """Milliseconds of one event and of one stamp, by a thousand of them; NaN where a level does other work as well."""
    if level in (3, "S"):
        return float("nan"), float("nan")
    if level == 0:
        return 0.0, 0.0
    log, begin = EventLog(1 << 10), time.perf_counter_ns()
    for _ in range(1000):
        log.put(0)
    event = (time.perf_counter_ns() - begin) / 1e9
    with watching(level, None, log):
        if device.type == "cuda" and (events := EVENTS.get()) is not None:
            events.fill(2002, torch.cuda.current_stream(device))
        clock, begin = PhaseClock(device), time.perf_counter_ns()
        for _ in range(1000):
            with clock.phase("route"):
                pass
        return event, (time.perf_counter_ns() - begin) / 1e9


def _accounted(
    noted: Sequence[tuple[int, int]], dear: tuple[float, float], base: Sequence[tuple[float, float]]
) -> tuple[float, float, float]:
    events, stamps = (float(median(one[place] for one in noted)) for place in (0, 1))
    return events, stamps, (events * dear[0] + stamps * dear[1]) / median(wall for wall, _ in base)


def _pairs(found: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """In order of token, then of square: the same places for every level."""
    return [both for times in found for both in times]


def _row(level: Level, found: Sequence[tuple[float, float]], base: Sequence[tuple[float, float]]) -> tuple[Any, ...]:
    row: list[Any] = [str(level), len(found)]
    for clock in (0, 1):
        mine, theirs = ([both[clock] for both in side] for side in (found, base))
        row += [median(mine), *_overhead(sorted(a / b for a, b in zip(mine, theirs, strict=True)))]
    return tuple(row)


def _overhead(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Median - 1 of sorted ratios, and the order statistics around it."""
    last = len(ratios) - 1
    low = max(0, floor(last / 2 - 0.98 * sqrt(len(ratios))))
    return median(ratios) - 1, ratios[low] - 1, ratios[last - low] - 1
