"""What the figures of a replay say: titles and notes on frames whose answer is known."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

import moe_lab as lab
from moe_lab.plots import waits
from moe_lab.replay import stalls, summary
from tests.support import cache_stories
from tests.support.cache_stories import Script, falling, five_fates, replayed, spans


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def title(axes) -> str:
    return axes.get_title(loc="left")


def test_replay_says_what_takes_the_time():
    axes = lab.plot.replay(replayed())
    assert title(axes) == "50% of all calls: experts; waiting for bytes 20.0%"
    assert [t.get_text() for t in axes.get_yticklabels()] == ["layer 0", "layer 1", "layer 2"]
    widths = sum(bar.get_width() for bar in axes.patches)
    assert widths == pytest.approx(30.0)  # the parts of three calls of 10 ms


def test_on_a_gpu_the_hosts_parts_are_drawn():
    axes = lab.plot.replay(replayed().assign(backend="cuda", launch_ms=7.0, other_ms=0.5))
    assert "experts" not in {text.get_text() for text in axes.get_legend().get_texts()}


def test_waterfall_stands_on_its_parts():
    axes = lab.plot.waterfall(falling())
    assert title(axes) == "Waiting for experts adds 3 of 10 ms a step"
    assert [bar.get_y() for bar in axes.patches] == [0, 5, 6, 6.5, 7.5, 9.5, 0]
    assert len(axes.get_legend().get_texts()) == 5


def test_timeline_joins_cause_and_effect():
    axes = lab.plot.timeline(spans())
    assert title(axes) == "2 reads in 9 ms, 1 of them ahead of the request"
    lanes = [t.get_text() for t in axes.get_yticklabels()]
    assert lanes == ["host", "reader 0", "reader 1", "copy", "compute", "side"]
    assert sum(text.arrow_patch is not None for text in axes.texts) == 3
    assert not lab.plot.timeline(spans(), arrows=False).texts


def test_stalls_name_the_first_cause():
    s = Script()
    for i in range(4):
        s.step(i)
        s.miss(10 * i, i, 10 * i, 10 * i + 1)
    axes = lab.plot.stalls(stalls(s.story, {0: range(2)}))
    assert title(axes) == "100% of the waiting: never predicted"
    axes = lab.plot.wait_ecdf(stalls(s.story, {0: range(2)}))
    assert title(axes) == "Half of the absent experts are there after 1 ms, 99 % after 1 ms"


@pytest.mark.parametrize("spread", [1.2, 3.0, 30.0, 1000.0])
def test_waits_of_any_spread_have_ticks_to_be_read_from(spread: float):
    one = cache_stories.waited().filter(items=waits.STALLS).iloc[:1]
    latencies = np.geomspace(0.7, 0.7 * spread, 20)
    axes = lab.plot.wait_ecdf(pd.concat([one.assign(latency_ms=ms) for ms in latencies]))
    low, high = axes.get_xlim()
    inside = [t.get_text() for t in axes.get_xticklabels() if low <= t.get_position()[0] <= high]
    assert 2 <= sum(bool(text) for text in inside) <= 14
    assert spread < 3 or len(inside) >= 3


def test_prefetch_counts_what_was_used():
    axes = lab.plot.prefetch(summary(five_fates()))
    assert title(axes) == "50% of what was read ahead was used"
    assert axes.texts[0].get_text() == "2.00 bytes a useful byte, recall 67%"
