"""The Explorer: alive as a widget, alive as plain HTML."""

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from bs4 import BeautifulSoup
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import moe_lab as lab
from moe_lab import explore
from moe_lab.arms import ARMS
from moe_lab.explore import Explorer, GridExplorer, PairExplorer
from moe_lab.parity import draw, wide_layer
from moe_lab.plots.style import LabFigure
from moe_lab.replay import run
from tests.support import frames
from tests.support.traces import random_trace, trace_of


def plain(value: object) -> Axes:
    axes = Figure(figsize=(1, 1)).subplots()
    axes.set_title(str(value))
    return axes


def explorer(values: list, **more: object) -> Explorer:
    return Explorer(values, plain, label="slots", alt=lambda v: f"picture of {v}", **more)


@pytest.fixture
def page() -> Iterator[BeautifulSoup]:
    yield BeautifulSoup(explorer([1, 8, 32], unit="MiB", start=1).to_html(), "html.parser")
    plt.close("all")


def test_html_holds_every_frame_and_shows_the_start(page: BeautifulSoup) -> None:
    pictures = page.select("img")
    assert [p["alt"] for p in pictures] == [f"slots {n} MiB: picture of {n}" for n in (1, 8, 32)]
    assert [p.has_attr("hidden") for p in pictures] == [True, False, True]
    assert all(p["src"].startswith("data:image/png;base64,") for p in pictures)
    assert page.output.text == "8 MiB"


def test_html_has_a_labelled_native_control(page: BeautifulSoup) -> None:
    control = page.select_one("label input[type=range]")
    assert (control["min"], control["max"], control["value"]) == ("0", "2", "1")
    assert page.label.text.strip() == "slots"


def test_html_is_the_same_twice_and_holds_no_address() -> None:
    first, second = (explorer(["a", "b"]).to_html() for _ in range(2))
    assert first == second
    assert not re.search(r"https?:", first)


def test_labels_are_escaped() -> None:
    html = Explorer(['<b>"x"</b>'], plain, label="<i>", alt=lambda v: f"{v} & more").to_html()
    assert "<b>" not in html
    assert "<i>" not in html
    assert BeautifulSoup(html, "html.parser").img["alt"] == '<i> <b>"x"</b>: <b>"x"</b> & more'


def test_dropdown_lists_every_value() -> None:
    page = BeautifulSoup(explorer(["lru", "lfu"], control="dropdown", start=1).to_html(), "html.parser")
    assert [o.text for o in page.select("option")] == ["lru", "lfu"]
    assert page.select_one("option[selected]").text == "lfu"


def test_moving_the_live_control_shows_the_frame_and_draws_each_once() -> None:
    drawn = []
    live = Explorer([3, 5], lambda v: drawn.append(v) or plain(v), label="T", alt=lambda v: f"frame {v}")
    assert drawn == [3]
    live.children[0].value = 1
    assert "frame 5" in live.children[1].value
    live.children[0].value = 0
    assert "frame 3" in live.children[1].value
    assert drawn == [3, 5]


def test_mimebundle_offers_the_widget_and_the_page() -> None:
    bundle = explorer([1, 2])._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"} <= set(bundle)
    assert bundle["text/plain"] == "slots 1: picture of 1"


def test_too_many_frames_are_thinned_with_a_warning_ends_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explore.MOST_FRAMES == 64
    monkeypatch.setattr("moe_lab.explore.explorer.MOST_FRAMES", 4)
    with pytest.warns(UserWarning, match="4 of the 10 frames"):
        pictures = BeautifulSoup(explorer(list(range(10)), start=9).to_html(), "html.parser").select("img")
    assert [p["data-label"] for p in pictures] == ["0", "3", "6", "9"]
    assert [p.has_attr("hidden") for p in pictures] == [True, True, True, False]


def test_frames_do_not_stay_open() -> None:
    before = plt.get_fignums()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        html = lab.explore.load(frames.random_loads(layers=3)).to_html()
    assert html.count("<img") == 3
    assert "hidden" in html
    assert plt.get_fignums() == before


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: explorer([]), "no values"),
        (lambda: explorer([1], start=1), "start=1"),
        (lambda: Explorer([1], plain, label="x"), "no alt text"),
        (lambda: Explorer([1], lambda v: "picture", label="x", alt=str), "returned str"),
    ],
    ids=["empty", "start", "alt", "frame"],
)
def test_what_cannot_be_shown_is_refused(make: object, says: str) -> None:
    with pytest.raises(lab.LabError, match=says):
        make()


def pair(**more: object) -> PairExplorer:
    return PairExplorer(
        [0, 5], ["a", "b", "c"], lambda n, s: described(f"picture of {n}{s}"), labels=("layer", "text"), **more
    )


def described(alt: str) -> Figure:
    figure = LabFigure(figsize=(1, 1))
    figure.subplots()
    figure.alt = alt
    return figure


def test_pair_holds_every_combination_and_shows_the_start() -> None:
    page = BeautifulSoup(pair(start=(1, 2)).to_html(), "html.parser")
    pictures = page.select("img")
    assert [p["alt"] for p in pictures[::5]] == ["layer 0, text a: picture of 0a", "layer 5, text c: picture of 5c"]
    assert [p.has_attr("hidden") for p in pictures] == [True] * 5 + [False]
    assert [s["value"] if s.has_attr("value") else s.text for s in page.select("option[selected]")] == ["5", "c"]
    assert [label.find(string=True).strip() for label in page.select("label")] == ["layer", "text"]


def test_moving_either_live_control_shows_their_combination() -> None:
    live = pair()
    first, second = live.children[0].children
    first.value = 1
    assert "picture of 5a" in live.children[1].value
    second.value = 2
    assert "picture of 5c" in live.children[1].value


def test_more_combinations_than_a_page_holds_are_refused() -> None:
    with pytest.raises(lab.LabError, match="10 x 7 = 70 frames"):
        PairExplorer(list(range(10)), list(range(7)), lambda a, b: described("x"), labels=("a", "b"))
    with pytest.raises(lab.LabError, match="'text': start=3"):
        pair(start=(0, 3))


def grid(**more: object) -> GridExplorer:
    values = {"T": [1, 64], "arms": ["a/b", "a/c", "b/c"], "layer": [0, 5]}
    return GridExplorer(values, lambda t, arms, n: described(f"picture of {t} {arms} {n}"), **more)


def test_a_grid_holds_every_combination_in_the_order_of_its_selects() -> None:
    page = BeautifulSoup(grid(start=(1, 0, 1), show={"T": lambda t: f"{t} rows"}).to_html(), "html.parser")
    pictures = page.select("img")
    assert [p["alt"] for p in pictures[::11]] == [
        "T 1 rows, arms a/b, layer 0: picture of 1 a/b 0", "T 64 rows, arms b/c, layer 5: picture of 64 b/c 5",
    ]  # fmt: skip
    assert [i for i, p in enumerate(pictures) if not p.has_attr("hidden")] == [7]
    assert [o.text for o in page.select("option[selected]")] == ["64 rows", "a/b", "5"]
    assert pictures[7]["alt"].endswith("picture of 64 a/b 5")


def test_moving_any_control_of_a_grid_shows_their_combination() -> None:
    live = grid()
    for box, value in zip(live.children[0].children, (1, 2, 1), strict=True):
        box.value = value
    assert "picture of 64 b/c 5" in live.children[1].value


def test_grids_that_cannot_be_shown_are_refused() -> None:
    with pytest.raises(lab.LabError, match="5 x 5 x 5 = 125 frames"):
        GridExplorer(dict.fromkeys("abc", range(5)), lambda *chosen: described("x"))
    with pytest.raises(lab.LabError, match="'arms': start=3"):
        grid(start=(0, 3, 0))
    with pytest.raises(lab.LabError, match="both controls are called 'a'"):
        PairExplorer([0], [1], lambda a, b: described("x"), labels=("a", "a"))


def test_parity_explorer_runs_each_arm_once_and_names_what_is_not_finite() -> None:
    layer, asked = wide_layer(d_model=256, d_expert=256, experts=2, top_k=1), []

    class Counted:
        name = "counted"

        def __getattr__(self, member: str) -> object:
            return getattr(ARMS["reference"], member)

        def experts(self, x, stack, schedule, groups, y, ctx) -> None:
            asked.append((len(x), float(x.abs().max()) > 1e10))
            ARMS["reference"].experts(x, stack, schedule, groups, y, ctx)

    live = explore.parity(
        {3: layer}, lambda n: draw("gaussian", 9, 256), arms=["reference", "gemv:q4_k", Counted()], tokens=(2, 9),
        scales=(1.0, 1e30),
    )  # fmt: skip
    page = BeautifulSoup(live.to_html(), "html.parser")
    assert len(page.select("img")) == 2 * 3 * 1 * 2
    assert sorted(asked) == [(2, False), (2, True), (9, False), (9, True)]
    shown = page.select_one("img:not([hidden])")["alt"]
    assert shown.startswith("T 9, arms reference / gemv:q4_k, layer 3, scale 1: ")
    lost = [p["alt"] for p in page.select("img") if "scale 1e+30" in p["alt"]]
    assert all("finite" in alt for alt in lost)
    with pytest.raises(lab.LabError, match="two arms or more"):
        explore.parity({3: layer}, lambda n: draw("gaussian", 9, 256), arms=["gemv"])


def test_routing_explorer_starts_ranges_at_domains() -> None:
    trace = random_trace(40, domains=np.array(["a"] * 25 + ["b"] * 15))
    page = BeautifulSoup(lab.explore.routing(trace, tokens=20, layers=[1, 2]).to_html(), "html.parser")
    assert [o.text for o in page.select("option")] == ["1", "2", "0 to 19 (a)", "25 to 39 (b)"]
    alt = page.select("img")[3]["alt"]
    assert alt.startswith("layer 2, tokens 25 to 39 (b): ")
    assert re.search(r"\d+% of picks repeat .* takes .* the mean.* successive tokens need", alt)
    assert plt.get_fignums() == []


def test_routing_explorer_says_when_it_leaves_layers_out() -> None:
    trace = random_trace(64, layers=20, experts=3, top_k=1)
    with pytest.warns(UserWarning, match="8 of the trace's 20 layers"):
        live = lab.explore.routing(trace, tokens=4)
    assert [name for name, _ in live.children[0].children[0].options] == ["0", "3", "5", "8", "11", "14", "16", "19"]
    with pytest.raises(lab.LabError, match=r"tokens 60\.\.65"):
        lab.explore.routing(trace, ranges=[(60, 65)])


RIBBON = trace_of([[[3, 1], [0, 1]], [[2, 3], [-1, -1]], [[3, 0], [1, 0]]], 4, token_ids=np.array([7, 8, 9]))


def cells(html: str) -> list[list[str]]:
    return [[td.text for td in row.select("td")] for row in BeautifulSoup(html, "html.parser").select("tr")]


def test_ribbon_has_a_row_a_layer_with_text_and_number() -> None:
    made = lab.explore.ribbon(RIBBON, lambda i: {7: " a", 8: "\n", 9: "  "}[i])
    assert cells(made.to_html()) == [[" a3", "↵2", "··3"], [" a0", "↵–", "··1"]]
    assert made._repr_html_() == made.to_html()
    rows = BeautifulSoup(made.html, "html.parser").select("th[scope=row]")
    assert [th.text for th in rows] == ["layer 0", "layer 1"]


def test_ribbon_titles_name_all_picks_and_colours_follow_experts() -> None:
    page = BeautifulSoup(lab.explore.ribbon(RIBBON, ["x", "y", "z"]).html, "html.parser")
    boxes = page.select("td")
    assert boxes[0]["title"] == "layer 0, token 0 'x': expert 3 (0.50), expert 1 (0.33)"
    assert boxes[4]["title"] == "layer 1, token 1 'y': no pick"
    colours = [box["style"].split("background:")[1] for box in boxes]
    assert colours[0] == colours[2] != colours[1]


def test_ribbon_escapes_text_and_loads_nothing() -> None:
    html = lab.explore.ribbon(RIBBON, ['<img src="http://x">', "&", "'"]).html
    assert "<img" not in html
    assert not re.search(r"<script|<link|url\(|\bid=", html)
    assert cells(html)[0][0] == '<img src="http://x">3'


def test_ribbon_breaks_lines_into_tables_and_takes_a_range() -> None:
    made = lab.explore.ribbon(random_trace(30, token_ids=np.arange(30)), str, start=3, stop=10, layers=[2], per_line=3)
    with pytest.raises(lab.LabError, match="no token ids"):
        lab.explore.ribbon(random_trace(30), lambda _: "t")
    assert [len(row) for row in cells(made.html)] == [3, 3, 1]


def test_ribbon_reads_the_shipped_tokenizer() -> None:
    pytest.importorskip("tokenizers")
    from moe_lab.explore.ribbon import piece_of

    piece = piece_of(lab.sample().parent / "tokenizer.json")
    assert "".join(piece(i) for i in [409, 818, 1851]).isprintable()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: lab.explore.ribbon(RIBBON, ["x"]), "1 pieces of text for 3 tokens"),
        (lambda: lab.explore.ribbon(RIBBON, ["x"], start=3), "tokens 3"),
        (lambda: lab.explore.ribbon(RIBBON, "no/tokenizer.json"), "no file"),
        (lambda: lab.explore.ribbon(random_trace(6001), ["x"] * 6001, stop=6001, layers=[0]), "6001 cells"),
    ],
    ids=["pieces", "range", "file", "cells"],
)
def test_ribbons_that_cannot_be_drawn_are_refused(make: object, says: str) -> None:
    with pytest.raises(lab.LabError, match=says):
        make()


def test_the_cache_explorer_shows_each_capacity_and_policy() -> None:
    trace = random_trace(tokens=80, layers=2, experts=8)
    found = explore.cache(trace, capacities=[4, 8], policies=["lru", "lfu_decay"], tokens=60)
    page = BeautifulSoup(found.to_html(), "html.parser")
    assert [[o.text for o in box.select("option")] for box in page.select("select")] == [
        ["4", "8"],
        ["lru", "lfu_decay"],
    ]
    table = lab.simulate(trace.part(0, 60), 8, ["lfu_decay"], per_layer=True)
    rate = table.hits.sum() / table.requests.sum()
    assert page.select("img")[3]["alt"].startswith(
        f"slots 8, policy lfu_decay: lfu_decay hits {rate:.1%} of the requests"
    )


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"capacities": [1]}, r"capacities\[0\] is 1; wanted 2"),
        ({"policies": ["mru"]}, "unknown eviction policy"),
        ({"tokens": 0}, "of 0 tokens"),
    ],
    ids=["capacity", "policy", "tokens"],
)
def test_a_cache_explorer_of_nothing_is_refused(how: dict, says: str) -> None:
    with pytest.raises(lab.LabError, match=says):
        explore.cache(random_trace(tokens=20, layers=2), **how)


def test_the_prefetch_explorer_has_a_frame_a_width() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a predictor that reads nothing has no bar, and no NaN in a figure
        found = explore.prefetch(
            frames.predictions().assign(read_precision=0.5, miss_coverage=[0.5, float("nan")] * 6, cache_slots=4)
        )
        alts = [found.drawn(i)[1] for i in range(2)]
    assert [alt.split(":")[0] for alt in alts] == ["experts read ahead 2 a token", "experts read ahead 3 a token"]


def test_the_purchases_explorer_prices_each_combination() -> None:
    trace = random_trace(tokens=40)
    found = explore.buy(trace, frames.cost_model(), 6, disk=(1, 2), slots=(1, 2), expert_bytes=(1,))
    alts = [found.drawn(i)[1] for i in range(4)]
    assert alts[3].startswith("disk x2, slots x2, bytes an expert x1: ")
    own = lab.caching.Change(name="both", disk=2, slots=2)
    bought = lab.caching.what_if(trace, frames.cost_model(), 6, changes=[own]).set_index("change")
    assert f"x{bought.speedup['both']:.2f}" in alts[3]
    with pytest.raises(lab.LabError, match="disk=0; wanted factors above 0"):
        explore.buy(trace, frames.cost_model(), 6, disk=(0,))
    with pytest.raises(lab.LabError, match="100 combinations"):
        explore.buy(trace, frames.cost_model(), 6, disk=range(1, 101), slots=(1,), expert_bytes=(1,))


def test_the_timeline_explorer_has_a_frame_a_step() -> None:
    with lab.open(lab.sample()) as ckpt, lab.ExpertCache(slots=8) as cache:
        recording = run(ckpt, tokens=3, layers=[1], cache=cache, arm="reference")
    found = explore.timeline(recording, 2)
    assert [found.drawn(i)[1].split(":")[0] for i in range(2)] == ["step 1", "step 2"]
    with pytest.raises(lab.LabError, match=r"most \(of lab.explore.timeline\) is 0; wanted 1..64"):
        explore.timeline(recording, 0)


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda t, c: explore.buy(t, c, 1.5), "capacity is 1.5 .*; wanted a whole number"),
        (lambda t, c: explore.buy(t, c, 0), "capacity is 0; wanted 1 or more"),
        (lambda t, c: explore.buy(t, "cheap", 6), "cost is 'cheap' .*; wanted a cost model"),
        (lambda t, c: explore.buy(t, c, 6, disk=2), "disk is 2 .*; wanted several factors"),
        (lambda t, c: explore.buy(t, c, 6, slots=["x"]), "slots is 'x' .*; wanted a number"),
        (lambda t, c: explore.buy(t, c, 6, slots=()), "slots is a tuple; wanted several factors"),
        (lambda t, c: explore.timeline("x"), "recording is 'x' .*; wanted what moe_lab.replay.run leaves"),
        (lambda t, c: lab.caching.Change(name="x", disk=0), "Change.disk is 0; wanted a factor above 0"),
    ],
    ids=["slots-1.5", "slots-0", "cost", "disk", "slots-text", "no-slots", "recording", "change"],
)
def test_what_explorers_do_not_take_is_named(call: Callable[..., Any], told: str) -> None:
    with pytest.raises(lab.LabError, match=told):
        call(random_trace(tokens=4), frames.cost_model())
