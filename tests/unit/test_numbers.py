"""Numbers read out of a page's outputs, and which of them moved."""

import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from moe_lab.report.numbers import Number, numbers
from moe_lab.report.reproduce import compare
from tests.support.notebooks import text


def shown(**data: str) -> list[Number]:
    cell = new_code_cell("show()", outputs=[new_output("display_data", data={"text/plain": "", **data})])
    return numbers(new_notebook(cells=[text("# T"), text("## Step"), cell]))


def html(markup: str) -> dict[tuple[str, str], str]:
    return {(n.row, n.column): n.text for n in shown(**{"text/html": markup})}


def printed(words: str) -> dict[tuple[str, str], str]:
    return {(n.row, n.column): n.text for n in shown(**{"text/plain": words})}


FRAME = pd.DataFrame({"arm": ["gemv", "mine"], "time_ms": [1.5, 2.0], "ok": [True, False]})


def test_pandas_table_is_keyed_by_index_and_column() -> None:
    assert html(FRAME.set_index("arm").to_html()) == {
        ("gemv", "time_ms"): "1.5", ("gemv", "ok"): "True", ("mine", "time_ms"): "2.0", ("mine", "ok"): "False",
    }  # fmt: skip


def test_without_an_index_the_first_column_names_the_row() -> None:
    assert html(FRAME.to_html(index=False))["mine", "time_ms"] == "2.0"
    assert html(FRAME.style.hide(axis="index").format(precision=1).to_html())["mine", "time_ms"] == "2.0"


def test_levels_of_a_pivot_are_joined() -> None:
    df = pd.DataFrame({"layer": [0, 0, 1, 1], "next": 9, "reads": [4, 8, 4, 8], "recall": [0.1, 0.2, 0.3, 0.4]})
    wide = df.pivot(index=["layer", "next"], columns="reads", values=["recall"])
    assert html(wide.to_html())["1 / 9", "recall / 8"] == "0.4"


def test_rows_in_another_order_are_the_same_rows() -> None:
    assert html(FRAME.set_index("arm").to_html()) == html(FRAME.set_index("arm").iloc[::-1].to_html())


def test_rows_of_one_name_are_told_apart() -> None:
    assert list(html(pd.concat([FRAME, FRAME]).to_html(index=False))) == [
        ("gemv", "time_ms"), ("gemv", "ok"), ("mine", "time_ms"), ("mine", "ok"),
        ("gemv #2", "time_ms"), ("gemv #2", "ok"), ("mine #2", "time_ms"), ("mine #2", "ok"),
    ]  # fmt: skip


def test_printed_frame_and_series_and_lines() -> None:
    frame = FRAME[["arm", "time_ms"]].assign(layer=[3, 5]).set_index("layer")
    assert printed(frame.to_string())["5", "time_ms"] == "2.0"
    assert printed(str(pd.Series({"every pick went somewhere": True})))["every pick went somewhere", ""] == "True"
    assert printed("lab-42m.gguf: 1,512 rows of q2_k, 2.5 ms") == {
        ("lab-42m.gguf: # rows of q2_k, # ms", "number 1"): "1,512",
        ("lab-42m.gguf: # rows of q2_k, # ms", "number 2"): "2.5",
    }


@pytest.mark.parametrize("words", ["", "q2_k and lab-42m", "<Figure size 800x360>", "1.2.3", "v0.1.0-rc1"])
def test_names_are_no_numbers(words: str) -> None:
    assert printed(words) == {}


def test_a_broken_table_costs_nothing() -> None:
    assert html("<table><tr><td rowspan=9999 colspan='-3'>a<td>1<tr><td>2") is not None


def test_ribbons_are_text() -> None:
    assert html('<div class="moe-ribbon"><table><tr><th>layer 0</th><td>5<sub>3</sub></td></tr></table></div>') == {}


def entry(value: str, column: str = "recall") -> Number:
    return Number(1, "T", 1, "row", column, value)


@pytest.mark.parametrize(
    ("before", "after", "moved"),
    [
        ("100", "104", False),
        ("100", "106", True),
        ("3", "4", True),
        ("0.05", "0.06", False),  # one step of the last digit: 0.0549 and 0.0551 look so
        ("0.05", "0.07", True),
        ("1.0e-05", "1.1e-05", False),
        ("1.0e-05", "1.3e-05", True),
        ("0.0e+00", "1.0e-09", True),
        ("0", "0", False),
        ("0", "1", True),
        ("nan", "nan", False),
        ("nan", "1", True),
        ("True", "False", True),
        ("1 234 567", "1 200 000", False),
        ("12%", "13%", False),
        ("12%", "15%", True),
        ("0.350 [0.341, 0.372]", "0.351 [0.1, 9.0]", False),
        ("0.350 [0.341, 0.372]", "0.450 [0.341, 0.372]", True),
        ("−5", "-5", False),
        ("-5", "5", True),
    ],
)
def test_moved_is_more_than_the_threshold_and_the_last_digit(before: str, after: str, moved: bool) -> None:
    assert bool(compare([entry(before)], [entry(after)], 0.05)) is moved


def test_change_is_relative_to_before() -> None:
    (one,) = compare([entry("-2.0")], [entry("-3.0")], 0.05)
    assert (one.kind, one.before, one.after, one.change) == ("value", "-2.0", "-3.0", -0.5)
    (one,) = compare([entry("0")], [entry("3")], 0.05)
    assert one.change is None


def test_gone_and_new_are_named_and_times_come_last() -> None:
    before = [entry("1.0", "time_ms"), entry("1.0", "a"), entry("1.0", "b")]
    after = [entry("9.0", "time_ms"), entry("1.0", "b"), entry("1.0", "c")]
    assert [(m.kind, m.column) for m in compare(before, after, 0.05)] == [
        ("gone", "a"),
        ("new", "c"),
        ("time", "time_ms"),
    ]


TIMES = ["time_ms", "fetch_ms", "time (µs), median [p20, p80]", "gb_per_s", "GB/s", "wall_us_p50", "seconds", "# ms"]


@pytest.mark.parametrize("name", TIMES)
def test_times_and_rates_are_known_by_their_names(name: str) -> None:
    assert entry("1", name).is_time


@pytest.mark.parametrize("name", ["recall", "tokens", "bytes_read", "hits", "nmse_ab", "experts (s of 8)", "misses"])
def test_other_names_are_no_times(name: str) -> None:
    assert not entry("1", name).is_time


RECORDS = pd.DataFrame(
    {"arm": ["gemv", "rate", "share"], "unit": ["ms", "GB/s", "share"], "n": [7, 8, 9], "p50": [1.5, 2.5, 0.25],
     "ratio_low": [0.9, 1.1, 1.2], "error": [1e-5, 2e-5, 3e-5], "tokens": [64, 64, 64]}
)  # fmt: skip


def test_numbers_of_a_record_are_in_the_unit_that_its_row_names() -> None:
    """A frame of `lab.bench` or `lab.diff` has one column for every metric's median and a unit a row."""
    found = {(n.row, n.column): n.is_time for n in shown(**{"text/html": RECORDS.to_html(index=False)})}
    assert {key for key, is_time in found.items() if is_time} == {
        ("gemv", "p50 (ms)"), ("gemv", "n (of time)"), ("gemv", "ratio_low (of time)"),
        ("rate", "p50 (GB/s)"), ("rate", "n (of time)"), ("rate", "ratio_low (of time)"),
    }  # fmt: skip
    assert {("gemv", "error"), ("gemv", "tokens"), ("share", "p50"), ("share", "n")} <= {*found}


def test_without_a_unit_a_records_columns_are_plain_numbers() -> None:
    found = shown(**{"text/html": RECORDS.drop(columns="unit").to_html(index=False)})
    assert not any(n.is_time for n in found)


def test_where_a_kernel_cuts_a_stream_moves_no_number() -> None:
    """Printed lines come in as many pieces as there were flushes, and stderr between them: that depends on time."""

    def read(*streams: tuple[str, str]) -> list[Number]:
        outputs = [new_output("stream", name=name, text=words) for name, words in streams]
        table = new_output("display_data", data={"text/html": FRAME.to_html(index=False)})
        return numbers(new_notebook(cells=[new_code_cell("show()", outputs=[*outputs, table])]))

    whole = read(("stdout", "nmse 3.6e-05\nlost 4.25\n"))
    assert [n.text for n in whole][:2] == ["3.6e-05", "4.25"]
    assert read(("stdout", "nmse 3.6e-05\n"), ("stderr", "W 1\n"), ("stdout", "lost 4"), ("stdout", ".25\n")) == whole
