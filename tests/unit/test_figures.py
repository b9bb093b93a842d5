"""Figures remember what they were drawn from, and `lab.plot.save` writes it: picture, data, settings."""

import hashlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import moe_lab as lab
from moe_lab.card import FIGURE_MIME
from moe_lab.plots.figure import MOST_EMBEDDED, Drawn, drawn
from moe_lab.trace import RoutingTrace
from tests.support import frames
from tests.support.traces import random_trace
from tests.unit.test_plots import DRAWN


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def test_every_plot_function_remembers() -> None:
    """A plot added without the decorator would have no data link in reports."""
    for name in lab.plot.__all__:
        plot = getattr(lab.plot, name)
        parameters = inspect.signature(plot).parameters if inspect.isfunction(plot) else {}
        if "ax" in parameters and next(iter(parameters)) == "df":
            assert hasattr(plot, "__wrapped__"), f"lab.plot.{name} is not decorated with @remembers"


@pytest.mark.parametrize("name", ["phases", "load-bars", "batching", "parity", "flips"])
def test_saved_data_and_options_draw_the_same_picture(name: str, tmp_path: Path) -> None:
    plot, frame = DRAWN[name]
    lab.plot.save(plot(frame()), tmp_path / "figure")
    spec = json.loads((tmp_path / "figure.json").read_text())
    (panel,) = spec["panels"]
    again = getattr(lab.plot, panel["plot"])(pd.read_csv(tmp_path / panel["csv"]), **panel["options"])
    assert lab.plot.png(again.figure) == lab.plot.png(plot(frame()).figure)
    assert hashlib.sha256((tmp_path / panel["csv"]).read_bytes()).hexdigest() == panel["sha256"]
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")


def test_spec_says_what_on_what_and_by_which_version(tmp_path: Path) -> None:
    paths = lab.plot.save(lab.plot.phases(frames.timings()), tmp_path / "new" / "phases.v2.pdf")
    assert [p.name for p in paths] == ["phases.v2.pdf", "phases.v2.csv", "phases.v2.json"]
    spec = json.loads(paths[2].read_text())
    assert {"moe_lab", "commit", "device", "backend", "matplotlib"} <= set(spec["environment"])
    assert spec["alt"].startswith("Fetch takes")
    assert spec["panels"][0]["rows"] == 3
    assert spec["panels"][0]["columns"]["route_ms"] == "float64"
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == sorted(p.name for p in paths)


def test_same_figure_same_bytes(tmp_path: Path) -> None:
    first, second = (lab.plot.load(frames.random_loads()) for _ in range(2))
    for stem, axes in (("a", first), ("b", second), ("c", second)):
        lab.plot.save(axes, tmp_path / stem)
        lab.plot.png(axes)
    for suffix in (".pdf", ".csv"):
        assert len({(tmp_path / f"{stem}{suffix}").read_bytes() for stem in "abc"}) == 1, suffix
    assert b"/Type3" not in (tmp_path / "a.pdf").read_bytes(), "journals refuse type 3 fonts"


def test_nothing_is_overwritten_unless_asked(tmp_path: Path) -> None:
    axes = lab.plot.phases(frames.timings())
    (tmp_path / "f.csv").write_text("mine")
    with pytest.raises(lab.LabError, match=r"f\.csv stands there already.*overwrite=True"):
        lab.plot.save(axes, tmp_path / "f")
    assert [p.name for p in tmp_path.iterdir()] == ["f.csv"]
    lab.plot.save(axes, tmp_path / "f", overwrite=True)
    assert (tmp_path / "f.csv").read_text().startswith("layer,")


def test_a_failing_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = lab.plot.phases(frames.timings())
    lab.plot.save(axes, tmp_path / "f")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Drawn, "csv", lambda self: "other")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(lab.LabError, match="No space left"):
        lab.plot.save(axes, tmp_path / "f", overwrite=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_figure_of_several_plots_saves_each(tmp_path: Path) -> None:
    left, right = Figure().subplots(1, 2)
    lab.plot.load(frames.random_loads(), ax=left)
    lab.plot.load(frames.random_loads(layers=1), ax=right)
    names = [p.name for p in lab.plot.save(left.figure, tmp_path / "two")]
    assert names == ["two.pdf", "two-1-load.csv", "two-2-load.csv", "two.json"]


def test_a_figure_of_your_own_takes_its_data_along(tmp_path: Path) -> None:
    figure = Figure()
    figure.subplots().plot([1, 2])
    with pytest.raises(lab.LabError, match=r"carries no data.*data="):
        lab.plot.save(figure, tmp_path / "own")
    lab.plot.save(figure, tmp_path / "own", data=pd.DataFrame({"y": [1, 2]}))
    assert (tmp_path / "own.csv").read_text() == "y\n1\n2\n"


@pytest.mark.wrong_types
def test_what_is_no_figure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(lab.LabTypeError, match="Figure or Axes, got DataFrame"):
        lab.plot.save(frames.timings(), tmp_path / "x")
    with pytest.raises(lab.LabError, match="names no file"):
        lab.plot.save(lab.plot.phases(frames.timings()), "")


def test_changing_the_frame_later_changes_nothing() -> None:
    df = frames.timings()
    axes = lab.plot.phases(df)
    df["layer"] = -1
    assert (drawn(axes)[0].df["layer"] >= 0).all()


def test_a_trace_is_kept_as_its_load_table() -> None:
    trace = random_trace()
    assert isinstance(trace, RoutingTrace)
    (note,) = drawn(lab.plot.load(trace))
    assert list(note.df.columns) == list(trace.load_table().columns)


def test_memory_goes_with_the_axes() -> None:
    import gc

    from moe_lab.plots import figure as room

    gc.collect()
    before = len(room._DRAWN)
    axes = lab.plot.phases(frames.timings())
    assert len(room._DRAWN) == before + 1
    plt.close(axes.figure)
    del axes
    gc.collect()
    assert len(room._DRAWN) == before


def test_a_notebook_gets_data_up_to_a_size() -> None:
    small = lab.plot.phases(frames.timings()).figure._repr_mimebundle_()[0][FIGURE_MIME]["panels"]
    assert small[0]["csv"].startswith("layer,")
    wide = frames.timings().assign(note="x" * MOST_EMBEDDED)
    big = lab.plot.phases(wide).figure._repr_mimebundle_()[0][FIGURE_MIME]["panels"]
    assert (big[0]["csv"], big[0]["rows"]) == (None, 3)


def test_a_stem_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(lab.LabError, match="names no file"):
        lab.plot.save(lab.plot.phases(frames.timings()), f"{tmp_path}/fig/")
    assert not [*tmp_path.iterdir()]
