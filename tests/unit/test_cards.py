"""What a notebook shows of an object: small, escaped, instant, and never a tensor's values."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from bs4 import BeautifulSoup

import moe_lab as lab
from moe_lab.card import MOST_TEXT, byte_size, card, spans
from moe_lab.checkpoint.tensor_file import TensorFile
from moe_lab.report import Report
from tests.support.notebooks import code, text


@pytest.fixture(scope="module")
def things() -> dict[str, Any]:
    ckpt = lab.open(lab.sample())
    layer = ckpt.layer(3)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    y = layer(x, "gemv")
    return {
        "Checkpoint": ckpt, "MoELayer": layer, "MoEOutput": y, "Routing": y.routing,
        "QuantTensor": lab.quantize(x, "q2_k"), "ParityReport": lab.compare(layer, x, arms=["gemv", "reference"]),
        "Prefilled": lab.prefill(layer, x, "token_loop"), "Timing": y.timing, "ExpertCache": lab.ExpertCache(slots=8),
        "RoutingTrace": lab.RoutingTrace.load(lab.sample().parent / "trace.parquet"),
    }  # fmt: skip


NAMES = ["Checkpoint", "MoELayer", "MoEOutput", "Routing", "QuantTensor", "ParityReport"]
NAMES += ["Prefilled", "Timing", "ExpertCache", "RoutingTrace"]
SAYS = {
    "Checkpoint": ["lab-42m.gguf", "qwen2_moe", "6: 0 to 5", "E=32", "down q3_k"],
    "MoELayer": ["MoELayer 3", "D=256", "q2_k/q2_k/q3_k", "resident on cpu"],
    "MoEOutput": ["[3, 256]", "gemv", "fetch"],
    "Routing": ["tokens, T", "3", "32"],
    "QuantTensor": ["q2_k", "[3, 256]", "252 B"],
    "ParityReport": ["gemv PASSED", "reference", "nmse_ab", "first difference"],
    "Prefilled": ["token_loop", "[3, 256]", "3", "wall (ms)"],
    "Timing": ["layer 3", "gemv", "compute_ms", "weight_bytes"],
    "ExpertCache": ["8", "lru", "0 B"],
    "RoutingTrace": ["32", "0 to 5", "weights"],
}


@pytest.mark.parametrize("name", NAMES)
def test_card_is_small_and_says_what_matters(name: str, things: dict[str, Any]) -> None:
    markup = things[name]._repr_html_()
    page = BeautifulSoup(markup, "html.parser")
    assert len(markup) < 3000
    assert not page.select("script, img, link, [src], [href]")
    for words in SAYS[name]:
        assert words in page.text


@pytest.mark.parametrize("name", NAMES)
def test_card_reads_no_tensor(name: str, things: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU reading a value waits for the device; of a 300 GB file it would be a read."""

    def read(*_: object, **__: object) -> None:
        pytest.fail("a card read a tensor")

    for method in ("item", "tolist", "__format__", "__repr__", "__str__", "cpu", "numpy", "sum", "max"):
        monkeypatch.setattr(torch.Tensor, method, read)
    for method in ("read", "raw", "stored"):
        monkeypatch.setattr(TensorFile, method, read)
    assert things[name]._repr_html_()


def test_names_out_of_a_file_are_escaped_and_cut(things: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = things["Checkpoint"]
    hostile = "<script>alert(1)</script>" + "x" * 100_000
    monkeypatch.setattr(ckpt, "metadata", {"general.architecture": hostile})
    markup = ckpt._repr_html_()
    assert "<script" not in markup
    assert len(markup) < 3000


def test_a_file_without_layers_has_a_card(things: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = things["Checkpoint"]
    for name, value in (("spec", None), ("moe_layers", []), ("_layout", None)):
        monkeypatch.setattr(ckpt, name, value)
    assert "none known" in ckpt._repr_html_()


def test_report_is_a_line_not_its_notebook() -> None:
    from nbformat.v4 import new_notebook

    made = Report(Path("some where/a<b>.html"), new_notebook(cells=[text("x" * 10_000), code("1")]), 2.5)
    assert repr(made) == "Report('some where/a<b>.html', 2 cells, 2.5 s)"
    page = BeautifulSoup(made._repr_html_(), "html.parser")
    assert page.a["href"] == "some%20where/a%3Cb%3E.html"
    assert page.text == "Report a<b>.html: 2 cells in 2.5 s"


def test_rows_and_values_of_a_card_are_bounded() -> None:
    markup = card("t", {"long": "y" * 999, "nothing": None}, head=("n",), rows=[(i,) for i in range(100)])
    page = BeautifulSoup(markup, "html.parser")
    assert len(page.td.text) == MOST_TEXT
    assert len(page.select("tbody tr")) == 16
    assert "84 more" in page.text
    assert "nothing" not in page.text


def test_runs_of_numbers_and_bytes_as_words() -> None:
    assert spans([0, 3, 4, 7, 8, 9]) == "0, 3, 4, 7 to 9"
    assert spans([]) == ""
    assert [byte_size(n) for n in (0, 1023, 1536, 300 * 1024**3)] == ["0 B", "1023 B", "1.5 KiB", "300.0 GiB"]


def test_every_public_object_with_tensors_has_a_card() -> None:
    """A dataclass that prints its tensors would fill a notebook's page."""
    for name in NAMES:
        assert dataclasses.is_dataclass(cls := getattr(lab, name, None)) is False or "_repr_html_" in vars(cls)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("MoEOutput", "Routing", "QuantTensor")])
def test_repr_is_a_line_without_values(name: str, things: dict[str, Any]) -> None:
    line = repr(things[name])
    assert line.startswith(name)
    assert len(line) < 400
    assert "tensor(" not in line
