"""The Explorer: alive as a widget, alive as plain HTML."""

import re
import warnings
from collections.abc import Iterator

import pytest
from bs4 import BeautifulSoup
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import moe_lab as lab
from moe_lab import explore
from moe_lab.explore import Explorer
from tests.support import frames


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
    monkeypatch.setattr(explore, "MOST_FRAMES", 4)
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
