"""Parameters of a notebook, and the exporter on cells that are already executed."""

import re
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_notebook, new_output

import moe_lab as lab
from moe_lab.explore import Explorer
from moe_lab.plots.style import Figure
from moe_lab.report.exporter import MoeHTMLExporter, latex2html, mathml
from moe_lab.report.parameters import parameter_names, with_parameters
from moe_lab.report.run import to_html
from tests.support.notebooks import code, text


def notebook(*cells: Any) -> Any:
    return new_notebook(cells=list(cells))


def page(*cells: Any, theme: str = "light") -> BeautifulSoup:
    return BeautifulSoup(to_html(notebook(*cells), Path("some/name.ipynb"), theme), "html.parser")


def shown(**data: str) -> Any:
    """A code cell that displayed `data` (mime type with _ for /)."""
    bundle = {key.replace("_", "/", 1): value for key, value in data.items()}
    return new_code_cell("show()", outputs=[new_output("display_data", data=bundle)])


def test_parameters_are_the_names_the_tagged_cell_assigns() -> None:
    book = notebook(code("a, b = 1, 2\nx = 3\ny: int = 4\nprint(x)", "parameters"), code("z = 1"))
    assert parameter_names(book, "n.ipynb") == ["x", "y"]


def test_given_values_come_right_after_the_parameters_cell() -> None:
    book = notebook(text("# T"), code("tokens = 1\npath = None", "parameters"), code("use(tokens)"))
    made = with_parameters(book, {"tokens": 64, "path": "a'b"}, "n.ipynb")
    assert [c["source"] for c in made["cells"][1:3]] == ["tokens = 1\npath = None", 'tokens = 64\npath = "a\'b"']
    assert made["cells"][2]["metadata"]["tags"] == ["injected-parameters"]
    assert len(book["cells"]) == 3


def test_unknown_parameter_is_refused_by_name() -> None:
    book = notebook(code("tokens = 1\nlayer = 2", "parameters"))
    with pytest.raises(lab.LabError, match=r"n.ipynb has no parameter 'token': it sets tokens, layer\."):
        with_parameters(book, {"token": 64}, "n.ipynb")


def test_notebook_without_the_tag_is_refused_by_parameter() -> None:
    with pytest.raises(lab.LabError, match="no parameter 'experts': it has no cell tagged 'parameters'"):
        with_parameters(notebook(code("experts = 4")), {"experts": 8}, "n.ipynb")


def test_two_parameter_cells_are_refused() -> None:
    book = notebook(code("a = 1", "parameters"), code("a = 2", "parameters"))
    with pytest.raises(lab.LabError, match="2 cells tagged 'parameters'"):
        with_parameters(book, {"a": 3}, "n.ipynb")


def test_value_that_is_no_literal_is_refused() -> None:
    with pytest.raises(lab.LabTypeError, match="'a' is a object"):
        with_parameters(notebook(code("a = 1", "parameters")), {"a": object()}, "n.ipynb")


def test_page_names_no_address_and_runs_no_script() -> None:
    made = page(text("# T\n\n$x$"), shown(text_plain="1"))
    raw = str(made)
    assert not re.search(r"https?://", raw)
    assert not made.select("script")
    assert not [
        t for t in made.select("[src], [href]") if not (t.get("src") or t.get("href")).startswith(("data:", "#"))
    ]


def test_formulas_are_mathml_also_in_outputs() -> None:
    made = page(
        text("$a_1$ and\n\n$$\\sum_k w_k$$\n\n\\begin{equation}b=1\\end{equation}"), shown(text_latex="$\\frac{a}{b}$")
    )
    assert [m.get("display") for m in made.select("math")] == ["inline", "block", "block", "inline"]
    assert "$" not in made.select_one("main").text


@pytest.mark.parametrize("formula", [r"\nosuchmacro x", r"\frac{", r"\left( x"], ids=["macro", "brace", "paren"])
def test_formula_that_cannot_be_drawn_stays_as_source(formula: str) -> None:
    html = mathml(formula, display="inline")
    assert html.startswith(("<code>", "<math"))
    if html.startswith("<code>"):
        assert BeautifulSoup(html, "html.parser").text == formula


def test_unknown_macro_is_source_not_half_a_formula() -> None:
    assert mathml(r"\nosuchmacro x", display="inline") == r"<code>\nosuchmacro x</code>"


@pytest.mark.parametrize("output", ["$$x^2$$", "$x^2$", "\\[x^2\\]", "x^2"])
def test_latex_output_with_or_without_delimiters(output: str) -> None:
    assert "<msup>" in latex2html(output)


def test_widget_with_html_exports_its_html() -> None:
    explorer = Explorer([1, 2], lambda v: Figure(figsize=(1, 1)), label="n", alt=str)
    bundle = explorer._repr_mimebundle_()
    made = page(new_code_cell("e", outputs=[new_output("display_data", data=bundle)]))
    assert len(made.select(".moe-explorer img")) == 2
    assert "Error displaying widget" not in str(made)
    assert not made.select("script")


def test_bare_widget_exports_as_text() -> None:
    bundle = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "IntSlider(value=3)"}
    made = page(new_code_cell("w", outputs=[new_output("display_data", data=bundle)]))
    assert "IntSlider(value=3)" in made.text


def test_alt_text_of_a_picture_is_kept_and_quoted() -> None:
    alt = 'Load "over" <mean>'
    output = new_output("display_data", data={"image/png": "iVBORw0KGgo="}, metadata={"image/png": {"alt": alt}})
    assert page(new_code_cell("p", outputs=[output])).img["alt"] == alt


def test_markdown_from_code_is_escaped_from_the_author_it_is_not() -> None:
    hostile = "<script>x=1</script><img src=x onerror=x>\n\n<img src=x onerror=x> [go](javascript:x) **bold**"
    made = page(shown(text_markdown=hostile))
    assert not made.select("script, img[onerror], a[href^=javascript]")
    assert made.strong.text == "bold"
    assert page(text("<b id=mine>x</b>")).select_one("#mine") is not None


def test_hidden_input_is_left_out_but_its_output_stays() -> None:
    hidden = new_code_cell("secret()", metadata={"tags": ["hide-input"]}, outputs=[new_output("stream", text="seen")])
    assert "secret" not in page(hidden).text
    assert "seen" in page(hidden).text


def test_stamp_and_notes_stand_at_the_end() -> None:
    book = notebook(text("# T"))
    book["metadata"]["moe_lab"] = {"environment": {"torch": "<2>", "backend": "torch"}, "notes": ["a & b"]}
    made = BeautifulSoup(to_html(book, Path("n.ipynb")), "html.parser")
    assert [d.text for d in made.select(".moe-stamp dd")] == ["<2>", "torch"]
    assert made.select_one(".moe-note").text == "a & b"


def test_same_notebook_same_bytes() -> None:
    cells = [text("# T"), shown(text_plain="1")]
    for number, cell in enumerate(cells):
        cell["id"] = f"c{number}"
    assert str(page(*cells)) == str(page(*cells))


def test_dark_theme_is_dark() -> None:
    assert page(text("# T"), theme="dark").body["data-jp-theme-light"] == "false"


def test_installed_as_an_nbconvert_format() -> None:
    from nbconvert.exporters import get_exporter

    assert get_exporter("moe_html") is MoeHTMLExporter
