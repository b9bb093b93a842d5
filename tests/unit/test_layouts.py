"""One expert in each layout: bytes worked out by hand, values that stay the same, and the command around it."""

import json
from pathlib import Path

import pytest
import torch

import moe_lab as lab
from moe_lab import layouts
from moe_lab.checkpoint.gguf_writer import write_gguf_tensors
from moe_lab.cli import main
from moe_lab.formats import Planar
from moe_lab.layouts import layout_rows
from moe_lab.weights import as_quant
from tests.support.tiny_gguf import write_tiny_qwen2moe as write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf")


def matrix(format: str) -> lab.QuantTensor:
    w = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    if format != "f32":
        return lab.quantize(w, format)
    whole = as_quant(w, "w", (32, 256))
    assert isinstance(whole, lab.QuantTensor)
    return whole


def test_raw_and_planar_k_quants_have_the_same_bytes_and_values(model: Path) -> None:
    with lab.open(model) as ckpt:
        rows = layout_rows(ckpt, 1, expert=5)
    assert [(r["role"], r["layout"], r["bytes"]) for r in rows] == [
        ("gate", "raw", 256 * 84), ("gate", "planar", 256 * 84), ("gate", "tiles", 256 * 84),
        ("up", "raw", 256 * 84), ("up", "planar", 256 * 84), ("up", "tiles", 256 * 84),
        ("down", "raw", 256 * 110), ("down", "planar", 256 * 110), ("down", "tiles", 256 * 110),
    ]  # fmt: skip
    assert {r["bits_per_weight"] for r in rows} == {2.625, 3.4375}
    assert all(r["same"] and r["decode_ms"] > 0 for r in rows)


def test_it_is_the_expert_asked_for_and_nothing_else_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(layouts, "_layouts", lambda q: seen.append(q) or [])
    with lab.open(model) as ckpt:
        layout_rows(ckpt, 1, expert=5)
        want = [ckpt.layer(1).experts.stack.matrix(role, 5) for role in ("gate", "up", "down")]
        monkeypatch.setattr(ckpt, "layer", None)
        layout_rows(ckpt, 1)
    assert [q.format for q in seen[:3]] == ["q2_k", "q2_k", "q3_k"]
    assert all(torch.equal(a.data, b.data) for a, b in zip(seen, want, strict=False))


@pytest.mark.parametrize(
    ("format", "wanted"),
    [
        ("f32", {"raw": 32 * 256 * 4}),
        ("fp8_block", {"raw": 32 * 256 + 2 * 4}),
        ("q8_0", {"raw": 32 * 8 * 34, "planar": 32 * 8 * 34, "tiles": 32 * 8 * 34}),
        ("mxfp4_oss", {"raw": 32 * 136, "transposed": 32 * 136, "both": 2 * 32 * 136}),
        ("nvfp4_ct", {"raw": 32 * 144 + 4, "transposed": 32 * 144 + 4, "both": 2 * (32 * 144 + 4)}),
    ],
)
def test_each_format_has_the_rows_of_its_layouts(format: str, wanted: dict[str, int]) -> None:
    q = matrix(format)
    kept = {k.layout: k for k in layouts._layouts(q)}
    assert {name: k.nbytes for name, k in kept.items()} == wanted
    assert all(torch.equal(k.decode(), q.dequantize()) for k in kept.values())


def test_a_layout_that_changes_a_value_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Planar.dequantize
    monkeypatch.setattr(Planar, "dequantize", lambda self: right(self).index_fill(0, torch.tensor(7), 1.0))
    with lab.open(model) as ckpt:
        assert [r["same"] for r in layout_rows(ckpt, 0)] == [True, False, True] * 3


def test_experts_that_cannot_be_streamed_are_read_with_their_layer(tmp_path: Path) -> None:
    shapes = {
        "ffn_gate_inp.weight": (4, 32), "exp_probs_b.bias": (4,), "ffn_up_exps.weight": (4, 16, 32),
        "ffn_down_exps.weight": (4, 32, 16), "ffn_up_shexp.weight": (8, 32), "ffn_down_shexp.weight": (32, 8),
    }  # fmt: skip
    arch = "nemotron_h_moe"
    keys = {f"{arch}.embedding_length": 32, f"{arch}.expert_count": 4, f"{arch}.expert_used_count": 2}
    tensors = {f"blk.0.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    with lab.open(write_gguf_tensors(tmp_path / "m.gguf", arch, tensors, keys)) as ckpt:
        rows = layout_rows(ckpt, 0)
    assert [(r["role"], r["layout"], r["bytes"]) for r in rows] == [("up", "raw", 2048), ("down", "raw", 2048)]


@pytest.mark.parametrize("expert", [-1, 8])
def test_an_expert_that_is_none_is_refused(model: Path, expert: int) -> None:
    with lab.open(model) as ckpt, pytest.raises(lab.LabError, match="expert"):
        layout_rows(ckpt, 0, expert=expert)


class TestCommand:
    def test_json_and_table(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", str(model), "--layouts", "--layer", "1", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        names = ("raw", "planar", "tiles")
        assert [(r["layer"], r["layout"], r["same"]) for r in rows] == [(1, name, True) for name in names] * 3
        assert {r["backend"] for r in rows} == {"torch"}
        assert main(["inspect", str(model), "--layouts"]) == 0
        out = capsys.readouterr().out
        assert all(word in out for word in ("planar", "bits per weight", "expert 0 of layer 0"))

    @pytest.mark.parametrize(
        "arguments",
        [["--layouts", "--layer", "9"], ["--layouts", "--gib", "1"], ["--layer", "0"], ["--device", "cpu"]],
        ids=" ".join,
    )  # fmt: skip
    def test_what_does_not_go_together_is_one_line(self, model: Path, arguments: list[str], capsys) -> None:
        code = main(["inspect", str(model), *arguments])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1)

    def test_a_file_without_experts_is_one_line(self, tmp_path: Path, capsys) -> None:
        path = write_gguf_tensors(tmp_path / "dense.gguf", "llama", {"w": torch.zeros(2, 2)})
        assert main(["inspect", str(path), "--layouts"]) == 2
        assert "no MoE layer" in capsys.readouterr().err
