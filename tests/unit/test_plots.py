"""Figures: what they draw, what they say, and what they leave alone."""

from collections.abc import Callable, Iterator
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import moe_lab as lab
from moe_lab.numerics.distance import error_bins
from moe_lab.plots import waits
from moe_lab.plots.style import LabFigure, ink_on
from moe_lab.replay import summary
from tests.support import cache_stories, frames
from tests.support.saved_runs import two_machines
from tests.support.traces import random_trace, trace_of

A = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
DRAWN: dict[str, tuple[Callable[..., Any], Callable[[], pd.DataFrame]]] = {
    "phases": (lab.plot.phases, frames.timings),
    "load-heat": (lab.plot.load, frames.random_loads),
    "load-bars": (lab.plot.load, lambda: frames.random_loads(layers=1)),
    "batching": (lab.plot.batching, lambda: frames.sweep({"gemv": {1: 1.0, 8: 2.0}, "per_token": {1: 1.0, 8: 8.0}})),
    "cost": (lab.plot.cost, frames.cost_curves),
    "parts": (lab.plot.parts, frames.parts),
    "skew": (lab.plot.skew, lambda: lab.analysis.skew(random_trace())),
    "coactivation": (lab.plot.coactivation, lambda: lab.analysis.coactivation(random_trace(), layers=[1])),
    "reuse": (lab.plot.reuse, lambda: lab.analysis.reuse(random_trace())),
    "union": (lab.plot.union, lambda: lab.analysis.union(random_trace())),
    "union-one-layer": (lab.plot.union, lambda: lab.analysis.union(random_trace(), layers=[0])),
    "next_layer": (lab.plot.next_layer, frames.predictions),
    "runs": (lab.plot.runs, two_machines),
    "flips": (lab.plot.flips, frames.flip_rates),
    "attribution": (lab.plot.attribution, frames.attribution),
    "attribution-cases": (lab.plot.attribution, frames.attributions),
    "error_map": (lab.plot.error_map, frames.error_map),
    "miss_ratio": (lab.plot.miss_ratio, lambda: lab.caching.miss_ratio(random_trace(tokens=60))),
    "stack_distance": (lab.plot.stack_distance, lambda: lab.caching.stack_distance(random_trace(tokens=60))),
    "policies": (lab.plot.policies, frames.policy_study),
    "bounds": (lab.plot.bounds, lambda: lab.caching.bounds(random_trace(tokens=60), frames.cost_model(), 6)),
    "what_if": (lab.plot.what_if, lambda: lab.caching.what_if(random_trace(tokens=60), frames.cost_model(), 6)),
    "cost_check": (lab.plot.cost_check, lambda: lab.caching.held_out(frames.cache_timings(noise=0.05))),
    "replay": (lab.plot.replay, cache_stories.replayed),
    "waterfall": (lab.plot.waterfall, cache_stories.falling),
    "timeline": (lab.plot.timeline, cache_stories.spans),
    "stalls": (lab.plot.stalls, lambda: cache_stories.waited().filter(items=waits.STALLS)),
    "wait_ecdf": (lab.plot.wait_ecdf, lambda: cache_stories.waited().filter(items=waits.STALLS)),
    "prefetch": (lab.plot.prefetch, lambda: summary(cache_stories.five_fates()).filter(items=waits.SUMMARY)),
    "parity": (lab.plot.parity, lambda: error_bins(A + 1e-4, A, arm_a="gemv", arm_b="reference")),
}
EVERY = pytest.mark.parametrize("name", DRAWN)


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


@EVERY
def test_draws_on_the_axes_given_and_returns_them(name: str) -> None:
    plot, frame = DRAWN[name]
    axes = Figure().subplots()
    assert plot(frame(), ax=axes) is axes
    assert axes.get_title(loc="left")
    assert "n = " in axes.get_xlabel() or name == "batching"


@EVERY
def test_leaves_rcparams_alone_and_never_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plt, "show", lambda *a, **k: pytest.fail("a plot function called show()"))
    mpl.get_backend()  # the backend is chosen by whoever asks first
    before = mpl.rcParams.copy()
    DRAWN[name][0](DRAWN[name][1]())
    assert mpl.rcParams == before


@EVERY
def test_same_frame_same_bytes_however_often_it_is_drawn(name: str) -> None:
    """Constrained layout starts from where the last drawing left the axes. The ground is opaque."""
    plot, frame = DRAWN[name]
    axes = plot(frame())
    before = [one.get_position(original=True).bounds for one in axes.figure.axes]
    data, metadata = axes.figure._repr_mimebundle_()
    shown = data["image/png"]
    assert lab.plot.png(axes) == shown == lab.plot.png(plot(frame()).figure)
    assert [one.get_position(original=True).bounds for one in axes.figure.axes] == before
    assert all(one.get_in_layout() for one in axes.figure.axes), "the next drawing lays them out too"
    assert shown.startswith(b"\x89PNG")
    assert b"tRNS" not in shown
    assert isinstance(axes.figure, LabFigure)
    assert len(metadata["image/png"]["alt"]) > 40, "the finding"


@EVERY
def test_missing_column_is_named(name: str) -> None:
    plot, frame = DRAWN[name]
    last = frame().columns[-1]
    with pytest.raises(lab.LabError, match=f"{last}.*the frame has"):
        plot(frame().drop(columns=last))


@EVERY
def test_empty_frame_is_refused(name: str) -> None:
    plot, frame = DRAWN[name]
    with pytest.raises(lab.LabError, match="without rows"):
        plot(frame().iloc[:0])


@pytest.mark.parametrize(
    ("reps", "wall", "says"), [(3, 11.0, "mean of n = 3 calls"), (8, 13.5, "middle half of n = 8")]
)
def test_phases_bars_add_up_to_the_middle_calls(reps: int, wall: float, says: str) -> None:
    axes = lab.plot.phases(frames.timings(layers=2, reps=reps))
    widths: dict[float, float] = {}
    for bar in axes.patches:
        widths[round(bar.get_y(), 3)] = widths.get(round(bar.get_y(), 3), 0.0) + bar.get_width()
    assert list(widths.values()) == pytest.approx([wall, wall])  # calls take 10, 11, 12 .. ms
    assert says in axes.get_xlabel()


def test_a_rare_wait_has_its_share_in_a_bar() -> None:
    """One call in eight waits 1 ms more; the call whose wall is the median is that one or is not."""
    df = frames.timings(layers=1, reps=8)
    df.loc[df.index[4], "fetch_ms"] += 1.0
    df.loc[df.index[4], "compute_ms"] -= 1.0
    usual = df["fetch_ms"].median()
    axes = lab.plot.phases(df)
    drawn = next(bar.get_width() for bar in axes.containers[1])
    assert drawn == pytest.approx(usual + 0.25)


def test_phases_title_names_the_largest_share_and_notes_the_cache() -> None:
    axes = lab.plot.phases(frames.timings(fetch_ms=6.0, misses=3, reps=2))
    assert axes.get_title(loc="left").startswith("Fetch takes 57% of the time (arm gemv")
    assert any(text.get_text() == "10 of 16 from the cache, 6 kB read" for text in axes.texts)
    assert "30 of 48 expert requests" in axes.figure.alt


def test_phases_without_a_cache_notes_no_hits() -> None:
    df = frames.timings(fetch_ms=0.0).assign(hits=0, misses=0, bytes_read=0)
    assert not any("cache" in text.get_text() for text in lab.plot.phases(df).texts)


def test_load_compares_each_layer_with_its_own_mean() -> None:
    """A mean over all layers would name layer 1, which is perfectly even."""
    df = frames.loads({0: [8, 0, 0, 0], 1: [100, 100, 100, 100]})
    axes = lab.plot.load(df)
    assert axes.get_title(loc="left") == "Layer 0: expert 0 takes 4.00x the mean load; 38% of experts idle"


def test_load_numbers_the_cells_by_expert_busiest_first() -> None:
    axes = lab.plot.load(frames.loads({0: [1, 5, 3], 7: [2, 2, 9]}))
    ids = [int(text.get_text()) for text in axes.texts if text.get_text().isdigit()]
    assert ids == [1, 2, 0, 2, 0, 1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 0", "layer 7"]


def test_load_takes_a_trace() -> None:
    ids = np.array([[[0, 1]], [[0, 2]], [[0, 65535]]], dtype=np.uint16)
    trace = lab.RoutingTrace(ids=ids, weights=np.ones_like(ids, dtype=np.float16), layers=(5,), num_experts=4, width=4)
    assert (
        lab.plot.load(trace).get_title(loc="left") == "Layer 5: expert 0 takes 2.40x the mean load; 25% of experts idle"
    )


def test_batching_states_the_gain_and_marks_where_it_begins() -> None:
    df = frames.sweep({"gemv": {1: 2.0, 8: 4.0, 64: 16.0}, "per_token": {1: 1.0, 8: 8.0, 64: 64.0}})
    axes = lab.plot.batching(df)
    assert axes.figure.get_suptitle() == "At T = 64, gemv is 4.0x faster than per_token (cpu, backend torch)"
    assert any("from T = 8" in text.get_text() for text in axes.texts)
    assert len(axes.figure.axes) == 3
    per_token = [line.get_ydata() for line in axes.lines if line.get_label() == "per_token"]
    np.testing.assert_allclose(per_token[0], [1000.0, 1000.0, 1000.0])


def test_batching_of_one_arm_alone() -> None:
    axes = lab.plot.batching(frames.sweep({"mine": {1: 1.0, 4: 2.0}}))
    assert axes.figure.get_suptitle().startswith("mine: time per token falls 2.0x from T = 1 to 4")


def test_batching_refuses_two_axes() -> None:
    with pytest.raises(lab.LabError, match="one Axes or on three, got 2"):
        lab.plot.batching(DRAWN["batching"][1](), ax=list(Figure().subplots(1, 2)))


def test_parity_names_the_worst_pair_and_each_share_of_equal_values() -> None:
    b = torch.ones(4)
    near = error_bins(torch.tensor([1.0, 1.0, 1.0, 1.0 + 2**-23]), b, arm_a="near", arm_b="ref", kind="ulp")
    far = error_bins(torch.tensor([1.0, 1.0, 1.0, 1.0 + 2**-20]), b, arm_a="far", arm_b="ref", kind="ulp")
    axes = lab.plot.parity(pd.concat([near, far]))
    assert axes.get_title(loc="left") == "far vs ref: no value is more than 15 ULP apart"
    assert [t.get_text() for t in axes.get_legend().get_texts()] == [
        "near vs ref (75.0% equal)",
        "far vs ref (75.0% equal)",
    ]


def test_parity_across_zero_tells_the_median_and_not_the_largest_ulp() -> None:
    a = torch.ones(4)
    bins = error_bins(a, a * torch.tensor([1 + 2**-22, 1 + 2**-22, 1 + 2**-22, -1]), arm_a="a", arm_b="b", kind="ulp")
    assert lab.plot.parity(bins).get_title(loc="left") == "a vs b: half of the values lie within 3 ULP"


def test_parity_of_equal_tensors_says_so() -> None:
    axes = lab.plot.parity(error_bins(A, A, arm_a="per_token", arm_b="gemv"))
    assert axes.get_title(loc="left") == "per_token vs gemv: bit-equal in every value"


def test_parity_refuses_mixed_kinds() -> None:
    both = [error_bins(A, A + 1, arm_a="a", arm_b="b", kind=kind) for kind in ("relative", "ulp")]
    with pytest.raises(lab.LabError, match="one kind at a time"):
        lab.plot.parity(pd.concat(both))


@pytest.mark.parametrize(
    ("colour", "ink"), [("#F0E442", "black"), ("#0072B2", "white"), ("white", "black"), ("#00224e", "white")]
)
def test_text_reads_on_its_ground(colour: str, ink: str) -> None:
    assert ink_on(colour) == ink


def test_coactivation_draws_one_layer() -> None:
    with pytest.raises(lab.LabError, match=r"layers 0, 1, 2.*df\[df.layer == n\]"):
        lab.plot.coactivation(lab.analysis.coactivation(random_trace()))


def test_coactivation_puts_experts_that_meet_side_by_side() -> None:
    picks = [[[0, 5]], [[2, 3]], [[1, 4]]] * 5 + [[[0, 2]], [[1, 3]], [[4, 5]]]
    axes = lab.plot.coactivation(lab.analysis.coactivation(trace_of(picks, 6)))
    order = [int(label.get_text()) for label in axes.get_xticklabels()]
    places = {expert: place for place, expert in enumerate(order)}
    assert {abs(places[a] - places[b]) for a, b in ((0, 5), (2, 3), (1, 4))} == {1}


def test_union_title_compares_with_chance() -> None:
    axes = lab.plot.union(lab.analysis.union(trace_of([[[0]], [[0]], [[1]], [[1]]] * 16, 2)))
    assert axes.get_title(loc="left") == "8 successive tokens need 2.0 experts: 2 at most, 2.0 if independent"


def test_reuse_title_names_the_first_control() -> None:
    df = lab.analysis.reuse(trace_of([[[i // 10 % 2]] for i in range(200)], 2))
    chance = df[(df["order"] == "shuffled") & (df["distance_to"] == 1)]["share_within"].item()
    title = lab.plot.reuse(df).get_title(loc="left")
    assert title == f"90% of picks repeat an expert of the token before; {chance:.0%} with the tokens shuffled"


def test_next_layer_names_best_and_worst_pair_and_bands_many() -> None:
    axes = lab.plot.next_layer(frames.predictions({"0→1": 0.4, "1→2": 0.8}))
    assert axes.get_title(loc="left") == "At k' = 2 the next router finds 80% of 1→2's picks, 40% of 0→1's"
    assert {"0→1", "1→2"} <= {text.get_text() for text in axes.texts}
    many = lab.plot.next_layer(frames.predictions({f"{i}→{i + 1}": 0.5 for i in range(20)}))
    assert not many.texts
    assert len(many.lines) == 3


def test_flips_title_has_the_widest_margin_that_flipped() -> None:
    axes = lab.plot.flips(frames.flip_rates())
    assert axes.get_title(loc="left") == "2.0% to 5.0% of tokens change experts, none with a margin of 1e-02 or more"


def test_attribution_names_the_leader_and_marks_first_and_last() -> None:
    axes = lab.plot.attribution(frames.attribution())
    assert axes.get_title(loc="left") == "(d) choice d makes 79% of the difference"
    assert [t.get_text() for t in axes.get_yticklabels()] == ["(a) choice a", "(d) choice d", "(e) choice e"]
    first, last = (line.get_xdata().tolist() for line in axes.lines[-2:])
    assert all(f > b for f, b in zip(first[:2], last[:2], strict=True))
    assert "choice a 22.5%" in axes.figure.alt


def test_attribution_of_cases_counts_leaders_and_keeps_each_whole() -> None:
    axes = lab.plot.attribution(frames.attributions())
    assert axes.get_title(loc="left") == "(d) choice d leads in 1 of 3 cases"
    widths: dict[int, float] = {}
    for bar in axes.patches:
        widths[round(bar.get_y())] = widths.get(round(bar.get_y()), 0.0) + bar.get_width()
    assert all(w == pytest.approx(1.0) for w in widths.values())
    assert len(widths) == 2
    assert any(t.get_text() == "equal" for t in axes.texts)


def test_attribution_without_a_difference_and_with_nan() -> None:
    equal = lab.plot.attribution(frames.attribution({"a": 0.0}))
    assert "same bits" in equal.get_title(loc="left")
    assert "not finite" in lab.plot.attribution(frames.attribution({"a": float("nan")})).get_title(loc="left")


def test_error_map_compares_blocks_within_their_row() -> None:
    """Expert 2 is three times as loud as expert 0; its blocks are coloured alike all the same."""
    axes = lab.plot.error_map(frames.error_map())
    image = axes.images[0].get_array()
    assert image.shape == (6, 16)
    assert np.allclose(image, image[0])
    assert image[0].argmin() % 8 == 6
    assert axes.get_title(loc="left") == "Blocks of gate differ by 3.0x in the error of side b against float64"
    even = lab.plot.error_map(frames.error_map(), value="nmse_a")
    assert "1.0x" in even.get_title(loc="left") or "No block" in even.get_title(loc="left")
    with pytest.raises(lab.LabError, match="draws nmse_a, nmse_b, nmse_ab"):
        lab.plot.error_map(frames.error_map(), value="ulp")


def test_policies_reads_against_lru_and_the_optimum() -> None:
    axes = lab.plot.policies(frames.policy_study())
    assert axes.get_title(loc="left") == "lfu_decay closes 40% of the gap between LRU and the optimum"
    notes = [text.get_text() for text in axes.texts]
    assert notes == ["40.0%  (-50% of the gap)", "50.0%", "58.0%  (+40% of the gap)", "70.0%", "22.0%"]
    assert [line.get_xdata()[0] for line in axes.lines] == [0.5, 0.7]


def test_bounds_adds_each_rung_to_the_one_before() -> None:
    df = lab.caching.bounds(random_trace(tokens=60), frames.cost_model(), 6)
    axes = lab.plot.bounds(df)
    widths: dict[float, float] = {}
    for bar in axes.patches:
        widths[round(bar.get_y(), 2)] = widths.get(round(bar.get_y(), 2), 0.0) + bar.get_width()
    np.testing.assert_allclose(list(widths.values()), df.sort_values("ms_per_step").ms_per_step)
    assert axes.get_title(loc="left").startswith("lru takes ")


def test_what_if_says_what_it_assumes() -> None:
    axes = lab.plot.what_if(lab.caching.what_if(random_trace(tokens=60), frames.cost_model(), 6))
    assert "by the model" in axes.get_title(loc="left")
    assert "one disk, no time for the exchange" in axes.figure.alt
