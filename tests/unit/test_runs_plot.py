"""`lab.plot.runs`: which marks stand where, and what the figure says of machines, losses and rows."""

from collections.abc import Iterator

import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import moe_lab as lab
from moe_lab.runs import Case, Status
from tests.support.saved_runs import ended, h200_run, passed, run, two_machines


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def marks(axes: Axes, number: int) -> list[tuple[float, int]]:
    """(value, row) of a run's medians."""
    lines = [line for line in axes.lines if line.get_label().startswith(f"{'ABC'[number]}: ")]
    assert len(lines) == 1
    return [(float(x), round(float(y))) for x, y in zip(lines[0].get_xdata(), lines[0].get_ydata(), strict=True)]


def row_labels(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def test_two_machines_stand_on_one_axis_with_device_and_backend() -> None:
    df = two_machines()
    axes = lab.plot.runs(df)
    for number, (_, part) in enumerate(df.groupby("run", sort=False)):
        assert marks(axes, number) == [(value, row) for row, value in enumerate(part["p50"])]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend[0].endswith(" · A laptop · torch")
    assert legend[1].endswith(" · NVIDIA H200 · cuda")
    assert axes.get_xscale() == "log"
    assert axes.get_title(loc="left") == "A is 100x slower than B (median of 4 shared rows)"


def test_one_row_holds_the_same_measurement_of_both_whatever_their_order() -> None:
    first, second = run(passed(1), passed(8, ms=3.0)), run(passed(8, ms=4.0, draw=1), passed(1, ms=2.0, draw=1))
    axes = lab.plot.runs(lab.runs([first, second]))
    assert [row for _, row in marks(axes, 0)] == [0, 1]
    assert [row for _, row in marks(axes, 1)] == [1, 0]
    assert row_labels(axes) == ["T=1 · gemv", "T=8 · gemv"]


def test_lines_run_from_the_20th_to_the_80th_percentile() -> None:
    record = passed(noise=0.2)
    axes = lab.plot.runs(run(record).frame.assign(run="mine", device="A laptop"))
    (segment,) = axes.collections[0].get_segments()
    assert segment[:, 0].tolist() == [record.spread.p20, record.spread.p80]
    assert "n = 40; line: 20th to 80th percentile; grey bar: floor" in axes.get_xlabel()
    assert axes.get_title(loc="left") == f"gemv has the least: {record.spread.p50:.3g} ms"


def test_counts_are_whole_in_a_frame_that_was_drawn_from_json() -> None:
    """JSON and CSV give a column with a missing value back as floats."""
    frame = run(passed(), passed(16, n=60), ended(Status.OOM)).frame.assign(run="mine", device="A laptop")
    axes = lab.plot.runs(frame.astype({"n": "float64"}))
    assert "(median, n = 40 to 60; line" in axes.get_xlabel()


def test_what_did_not_pass_is_named_and_has_no_mark() -> None:
    made = run(passed(), *(ended(status, arm=status.lower()) for status in Status if status != "PASSED"))
    axes = lab.plot.runs(lab.runs(made))
    assert sorted(text.get_text() for text in axes.texts) == ["ERROR", "INCORRECT", "OOM", "UNSUPPORTED"]
    assert len(marks(axes, 0)) == 1
    assert "4 did not pass" in axes.figure.alt


def test_sizes_are_named_where_no_model_implies_them() -> None:
    cases = [Case(workload="uniform", d_model=d, tokens=8) for d in (256, 512)]
    assert row_labels(lab.plot.runs(lab.runs(run(*(passed(case=case) for case in cases))))) == [
        "D=256 · gemv", "D=512 · gemv",
    ]  # fmt: skip


def test_recorded_h200_rows_draw_beside_a_laptops() -> None:
    there = h200_run()
    layers = there.frame["what"] == "layer"
    df = lab.runs([there, run(passed(1, unit="us", ms=900.0))])
    axes = lab.plot.runs(df[(df["what"] == "layer")])
    assert len(marks(axes, 0)) == int(layers.sum())
    assert "lab-42m" in " ".join(row_labels(axes))


def test_runs_with_nothing_in_common_say_so() -> None:
    axes = lab.plot.runs(lab.runs([run(passed(1)), run(passed(2))]))
    assert axes.get_title(loc="left") == "A, B have no measurement in common"
    nothing = lab.plot.runs(lab.runs(run(ended(Status.OOM))))
    assert nothing.get_title(loc="left") == "nothing passed"


def test_two_machines_stand_in_the_benchmarks_figure_too() -> None:
    here = run(passed(ms=3.0, noise=0.001), passed(arm="mine", ms=2.0), ended(Status.ERROR, arm="off"))
    df = lab.runs([here, h200_of_8_tokens()])
    axes = lab.plot.bench(df)
    named = [f"{letter} · {arm} · warm" for arm in ("gemv", "mine") for letter in "AB"]
    assert row_labels(axes) == [*named, "A · off · warm"]
    first, second = (row["p50"] * 1e3 for _, row in df[df["arm"] == "gemv"].iterrows())
    title = f"gemv at T = 8: A {first:,.0f} \u00b5s (A laptop), B {second:.3g} \u00b5s (NVIDIA H200)"
    assert axes.get_title(loc="left") == title
    for letter, label in zip("AB", df["run"].unique(), strict=True):
        assert f"{letter}: {label} on " in axes.figure.alt
    alone = lab.plot.bench(df[df["device"] == "NVIDIA H200"])
    assert row_labels(alone) == ["gemv · warm", "mine · warm"]
    apart = lab.plot.bench(lab.runs([run(passed(1)), run(passed(8))]))
    assert apart.get_title(loc="left") == "A, B have no timed measurement in common"


def h200_of_8_tokens():
    there = {"device": "NVIDIA H200", "backend": "cuda"}
    records = (passed(arm=arm, ms=ms, backend="cuda", noise=0.001) for arm, ms in (("gemv", 0.01), ("mine", 0.02)))
    return run(*records, environment=there)


def test_one_metric_and_unit_and_at_most_sixty_rows() -> None:
    two = lab.runs([run(passed()), run(passed(unit="us"))])
    with pytest.raises(lab.LabError, match="one unit, got ms, us"):
        lab.plot.runs(two)
    many = lab.runs(run(*(passed(tokens) for tokens in range(61))))
    with pytest.raises(lab.LabError, match="60 rows at most, got 61"):
        lab.plot.runs(many)
    lab.plot.runs(pd.concat([many[:30], many[:30]]))  # an index that repeats is no obstacle
