"""The inspector's numbers against sizes worked out by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moe_lab as lab
from moe_lab.checkpoint.gguf_writer import write_gguf_tensors
from moe_lab.cli import main
from moe_lab.inspect import COLUMNS, inspect_checkpoint, memory, summary
from moe_lab.open import Checkpoint
from tests.support import sparse_models
from tests.support.tiny_gguf import entry, raw_gguf, text
from tests.support.tiny_gguf import write_tiny_qwen2moe as write_tiny

Q2_ROW, Q3_ROW, Q8_ROW = 84, 110, 8 * 34  # bytes of a row of 256 values
EXPERT = 256 * (2 * Q2_ROW + Q3_ROW)
SHARED = 3 * 256 * Q8_ROW + 256 * 4
ROUTER = 8 * 256 * 4


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return lab.open(write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf"))


def test_a_row_for_each_moe_layer(ckpt: Checkpoint) -> None:
    table = inspect_checkpoint(ckpt)
    assert tuple(table.columns) == COLUMNS
    assert table.layer.tolist() == [0, 1]
    row = table.iloc[1]
    assert (row.experts, row.top_k, row.router) == (8, 2, "softmax, top-2 of 8")
    assert (row.format_gate, row.format_up, row.format_down, row.format_shared) == ("q2_k", "q2_k", "q3_k", "q8_0")
    assert (row.bytes_per_expert, row.bytes_shared) == (EXPERT, SHARED)
    assert (row.family, row.activation, row.shared) == ("qwen2_moe", "silu", "width 256, gated")
    assert row.bytes_per_layer == ROUTER + 8 * EXPERT + SHARED
    assert row.active_bytes_per_token == ROUTER + 2 * EXPERT + SHARED


def test_label_and_truth_are_shown_apart(ckpt: Checkpoint) -> None:
    """The file calls itself Q2_K (2.625 bits); its experts take a third of Q3_K's 3.4375 as well."""
    row = inspect_checkpoint(ckpt).iloc[0]
    assert row.bits_nominal == 2.625
    assert row.bits_actual == pytest.approx((2 * 2.625 + 3.4375) / 3)


def test_summary_counts_slots_as_the_cache_does(ckpt: Checkpoint) -> None:
    gib = 5.5 * EXPERT / 2**30
    facts = summary(ckpt, gib=gib)
    assert facts["slot_bytes"] == EXPERT  # every part is a multiple of 256 bytes already
    assert (facts["slots"], facts["total_experts"], facts["share_of_experts"]) == (5, 16, 5 / 16)
    assert (facts["family"], facts["moe_layers"], facts["expert_bytes"]) == ("qwen2_moe", 2, 16 * EXPERT)
    assert facts["file_bytes"] == ckpt.path.stat().st_size
    assert facts["shared_expert"] == "width 256, gated"


def test_summary_refuses_a_memory_of_nothing(ckpt: Checkpoint) -> None:
    with pytest.raises(lab.LabError, match="above 0"):
        summary(ckpt, gib=0.0)


def test_file_without_moe_layers(tmp_path: Path) -> None:
    path = tmp_path / "dense.gguf"
    path.write_bytes(raw_gguf((entry("general.architecture", 8, text("llama")),)))
    dense = lab.open(path)
    assert len(inspect_checkpoint(dense)) == 0
    assert (summary(dense)["family"], summary(dense)["architecture"]) == (None, "llama")


def test_several_memories_and_more_slots_than_experts(ckpt: Checkpoint) -> None:
    few, many = memory(ckpt, [3 * EXPERT / 2**30, 1.0])
    assert (few["slots"], few["share_of_experts"]) == (3, 3 / 16)
    assert (many["slots"], many["share_of_experts"]) == (2**30 // EXPERT, 1.0)


def test_formats_are_each_roles_own_and_a_clamp_or_bias_is_told(tmp_path: Path) -> None:
    """Gate, up and down of one layer in three formats, as quantisers mix them; bytes and bits follow."""
    b, kinds = "blk.0.", {"gate": "q4_k", "up": "q2_k", "down": "q6_k"}
    tensors: dict[str, torch.Tensor | lab.QuantTensor] = {b + "ffn_gate_inp.weight": torch.zeros(4, 256)}
    for part, kind in kinds.items():
        data = torch.zeros(4, 256, lab.FORMATS[kind].row_bytes(256), dtype=torch.uint8)
        tensors[f"{b}ffn_{part}_exps.weight"] = lab.QuantTensor.from_bytes(data, kind, (4, 256, 256))
    tensors[b + "exp_probs_b.bias"] = torch.zeros(4)
    keys = {"embedding_length": 256, "expert_count": 4, "expert_used_count": 2}
    path = write_gguf_tensors(
        tmp_path / "m.gguf", "minimax-m2", tensors, {f"minimax-m2.{key}": value for key, value in keys.items()}
    )
    with lab.open(path) as opened:
        row = inspect_checkpoint(opened).iloc[0]
        expert = 256 * (144 + 84 + 210)
        assert [row[f"format_{part}"] for part in kinds] == list(kinds.values())
        assert (row.bytes_per_expert, row.bits_actual) == (expert, 8 * expert / (3 * 256 * 256))
        assert row.active_bytes_per_token == 2 * expert + 4 * 4 * 256 + 4 * 4
        assert row.router == "sigmoid, top-2 of 4, with a correction bias, normalised"


def test_a_layer_that_cannot_be_streamed_has_no_slots_and_says_why(tmp_path: Path) -> None:
    b = "blk.0."
    shapes = {
        "ffn_gate_inp.weight": (4, 32), "exp_probs_b.bias": (4,), "ffn_up_exps.weight": (4, 16, 32),
        "ffn_down_exps.weight": (4, 32, 16), "ffn_up_shexp.weight": (8, 32), "ffn_down_shexp.weight": (32, 8),
    }  # fmt: skip
    arch = "nemotron_h_moe"
    keys = {f"{arch}.embedding_length": 32, f"{arch}.expert_count": 4, f"{arch}.expert_used_count": 2}
    tensors = {b + name: torch.zeros(shape) for name, shape in shapes.items()}
    with lab.open(write_gguf_tensors(tmp_path / "m.gguf", arch, tensors, keys)) as opened:
        facts = summary(opened, gib=1.0)
        assert (facts["slot_bytes"], facts["slots"], facts["share_of_experts"]) == (None, None, None)
        assert "no gate" in facts["streaming"]
        row = inspect_checkpoint(opened).iloc[0]
        assert (row.format_gate, row.bits_actual) == (None, 32.0)


class TestCommand:
    def call(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
        code = main(["inspect", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    def test_json_has_a_row_a_layer_with_the_slots_of_each_memory(self, ckpt: Checkpoint, capsys) -> None:
        code, out, _ = self.call(capsys, str(ckpt.path), "--gib", "0.5,1", "--json")
        answer = json.loads(out)
        assert code == 0
        assert set(answer) == {"command", "ok", "device", "backend", "rows"}
        assert [row["layer"] for row in answer["rows"]] == [0, 1]
        assert set(answer["rows"][0]) == {*COLUMNS, "slots_0.5gib", "slots_1gib"}
        assert answer["rows"][0]["slots_1gib"] == 2**30 // EXPERT
        assert [row["family"] for row in answer["rows"]] == ["qwen2_moe"] * 2
        assert answer["rows"][0]["activation"] == "silu"
        assert answer["rows"][0]["shared"] == "width 256, gated"

    def test_the_table_shows_formats_and_memory(self, ckpt: Checkpoint, capsys) -> None:
        code, out, err = self.call(capsys, str(ckpt.path), "--gib", "1")
        assert (code, err) == (0, "")
        assert all(word in out for word in ("q2_k", "q3_k", "qwen2_moe", "slots in 1 GiB"))

    @pytest.mark.parametrize("gib", ["0", "-1", "8,", "eight", "nan", "8;16"])
    def test_a_memory_that_is_none_is_one_line_and_exit_2(self, ckpt: Checkpoint, capsys, gib: str) -> None:
        code, out, err = self.call(capsys, str(ckpt.path), f"--gib={gib}")
        assert (code, out, err.count("\n")) == (2, "", 1)

    def test_a_file_without_experts_is_its_summary(self, tmp_path: Path, capsys) -> None:
        path = write_gguf_tensors(tmp_path / "dense.gguf", "llama", {"w": torch.zeros(2, 2)})
        code, out, _ = self.call(capsys, str(path), "--gib", "8", "--json")
        (row,) = json.loads(out)["rows"]
        assert (code, row["family"], row["moe_layers"], row["architecture"]) == (0, None, 0, "llama")
        assert self.call(capsys, str(path))[0] == 0


MEASURE = """
import json, resource, sys, time
import pandas, torch
import moe_lab.cli.app, moe_lab.cli.inspect, moe_lab.cli.output, moe_lab.open
from moe_lab.cli import main
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
for path in sys.argv[1:]:
    start = time.process_time()
    code = main(["inspect", path, "--gib", "8,16,24", "--json"])
    print(json.dumps({"code": code, "cpu_s": time.process_time() - start, "extra_mb": peak() - before}))
"""


def test_models_of_hundreds_of_gigabytes_are_inspected_at_once(tmp_path: Path) -> None:
    """300 GB of GGUF in a second, 1.3 TB in 44,834 tensors and 58 files in four; 200 MB of memory for both.

    Processor time, since a test machine has other work too.
    """
    paths = [sparse_models.sparse_gguf(tmp_path / "m.gguf"), sparse_models.sparse_folder(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, paths)], capture_output=True, text=True, timeout=120, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for answer, cost, size, cpu_s in ((*lines[:2], 300e9, 1.0), (*lines[2:], 1300e9, 4.0)):
        assert len(answer["rows"]) == 58
        assert sum(row["bytes_per_layer"] for row in answer["rows"]) > size
        assert answer["rows"][0]["slots_24gib"] > 0
        assert cost["code"] == 0
        assert cost["cpu_s"] < cpu_s
        assert cost["extra_mb"] < 200
