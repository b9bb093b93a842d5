"""Tables for papers: headers, numbers, spread, and LaTeX that compiles whatever the cells hold."""

import math

import pandas as pd
import pytest
from bs4 import BeautifulSoup

import moe_lab as lab
from moe_lab.plots.latex import escape
from moe_lab.plots.table import header_of, text_of
from tests.support import latex_syntax

TIMES = pd.DataFrame(
    {
        "arm": ["gemv", "mine"],
        "time_ms_p20": [0.3412, 12.0],
        "time_ms_p50": [0.35, 12.5],
        "time_ms_p80": [0.372, 13.25],
        "n": [20, 5],
    }
)


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("time_ms", "time (ms)"),
        ("time_ms_p50", "time (ms), median"),
        ("wall_us_p80", "wall (µs), p80"),
        ("read_gb_per_s", "read (GB/s)"),
        ("gb_per_s", "GB/s"),
        ("weight_bytes", "weight (B)"),
        ("bytes_read", "bytes read"),
        ("hits", "hits"),
        ("top_k", "top k"),
        ("tokens", "tokens"),
    ],
)
def test_units_stand_in_the_header(name: str, header: str) -> None:
    assert header_of(name) == header


def test_a_distribution_is_one_column_with_its_spread_and_n() -> None:
    made = lab.plot.table(TIMES)
    assert made.headers == ("arm", "time (ms), median [p20, p80]", "n")
    assert made.rows == (("gemv", "0.350 [0.341, 0.372]", "20"), ("mine", "12.5 [12.0, 13.2]", "5"))
    assert made.numeric == (False, True, True)


def test_median_alone_stays_a_median() -> None:
    assert lab.plot.table(TIMES, columns=["n", "time_ms_p50"]).headers == ("n", "time (ms), median")


def test_a_frame_of_runs_names_its_one_metric_in_the_header() -> None:
    df = pd.DataFrame({"arm": ["a", "b"], "metric": "time", "unit": "us", "p20": [1.0, None], "p50": [2.0, None],
                       "p80": [3.0, None], "n": [7, None], "status": ["PASSED", "INCORRECT"]})  # fmt: skip
    made = lab.plot.table(df)
    assert made.headers == ("arm", "time (us), median [p20, p80]", "n", "status")
    assert made.rows[0] == ("a", "2.00 [1.00, 3.00]", "7", "PASSED")
    assert made.rows[1] == ("b", "–", "–", "INCORRECT"), "a wrong arm has no speed"
    mixed = df.assign(unit=["us", "ms"])
    assert lab.plot.table(mixed).headers[:4] == ("arm", "metric", "unit", "median [p20, p80]")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234567, "1,234,567"),
        (0.00123456, "0.00123"),
        (1.23456e-7, "1.23e-07"),
        (4380.4, "4,380"),
        (0.0, "0.00"),
        (True, "yes"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "inf"),
        ("two\nlines", "two lines"),
    ],
    ids=str,
)
def test_values_as_text(value: object, text: str) -> None:
    assert text_of(value) == text


def test_columns_of_one_header_both_stay() -> None:
    made = lab.plot.table(pd.DataFrame({"time_ms": [1.0], "time (ms)": [2.0]}))
    assert made.rows == (("1.00", "2.00"),)


def test_html_is_escaped() -> None:
    markup = lab.plot.table(pd.DataFrame({"<b>": ["<script>x</script>"]}), caption="<i>")._repr_html_()
    page = BeautifulSoup(markup, "html.parser")
    assert not page.select("b, i, script")
    assert page.td.text == "<script>x</script>"


HOSTILE = [
    "[0.1]",
    "*",
    "a & b",
    "50 % of $x_1$",
    "#1 {~^}",
    "\\input{x}",
    "<|>",
    '"`',
    "µs – ≤ × ∞ −1",
    "tab\tbed\x00",
]


def test_latex_compiles_whatever_the_cells_hold() -> None:
    df = pd.DataFrame({"arm_1 [%]": HOSTILE, "nmse": [-1.5e-7] * len(HOSTILE), "time_us": 3})
    source = lab.plot.to_latex(df, caption="100 % & \\more_", label="tab:a b")
    assert latex_syntax.problems(source) == []
    assert r"$-1.50\times 10^{-7}$" in source
    assert r"\label{tab:a-b}" in source
    assert r"\textbackslash{}input\{x\}" in source


@pytest.mark.parametrize(
    "broken",
    ["{", "a & b \\\\ x", "\\begin{table}", "a_b"],
    ids=["brace", "row", "open", "underscore"],
)
def test_the_check_finds_what_pdflatex_stops_at(broken: str) -> None:
    good = lab.plot.to_latex(TIMES)
    assert latex_syntax.problems(good) == []
    assert latex_syntax.problems(good.replace("gemv", broken)) != []


def test_escaped_text_is_one_line() -> None:
    assert escape("a\n\nb\x07") == "a  b"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: lab.plot.table(TIMES.iloc[:0]), "without rows"),
        (lambda: lab.plot.table(TIMES, columns=["speed"]), "column speed"),
        (lambda: lab.plot.table(pd.concat([TIMES] * 501)), "1,002 rows"),
        (lambda: lab.plot.table(TIMES, digits=0), "digits=0"),
    ],
    ids=["empty", "column", "rows", "digits"],
)
def test_what_cannot_be_a_table_is_refused(call, says: str) -> None:
    with pytest.raises(lab.LabError, match=says):
        call()


def test_the_index_that_groupby_leaves_is_shown() -> None:
    df = pd.DataFrame({"arm": ["a", "a", "b"], "top_k": [1, 2, 1], "time_ms": [1.0, 3.0, 5.0]})
    one, two = df.groupby("arm").time_ms.mean().to_frame(), df.groupby(["arm", "top_k"]).mean()
    assert lab.plot.table(one).headers == ("arm", "time (ms)")
    assert "a & 2.00" in lab.plot.to_latex(one)
    assert lab.plot.table(two).headers == ("arm", "top k", "time (ms)")
    assert lab.plot.table(two).rows[1] == ("a", "2", "3.00")
    assert lab.plot.table(two, columns=["time_ms", "arm"]).rows[2] == ("5.00", "b")
    assert list(one.columns) == ["time_ms"], "the caller's frame stays as it was"


def test_an_index_of_texts_is_shown_and_one_that_counts_rows_is_not() -> None:
    df = pd.DataFrame({"hits": [1, 2]}, index=["lru", "lfu"])
    assert lab.plot.table(df).headers == ("", "hits")
    assert lab.plot.table(df).rows[1] == ("lfu", "2")
    assert lab.plot.table(TIMES[TIMES.n < 10]).headers[0] == "arm"
    assert lab.plot.table(TIMES.set_index("arm", drop=False)).headers.count("arm") == 1


def test_one_unit_is_in_the_header_also_when_its_column_is_not_chosen() -> None:
    df = pd.DataFrame({"arm": ["a"], "metric": "time", "unit": "us", "p20": [1.0], "p50": [2.0], "p80": [3.0]})
    made = lab.plot.table(df, columns=["arm", "unit", "p20", "p50", "p80"])
    assert made.headers == ("arm", "time (us), median [p20, p80]")
