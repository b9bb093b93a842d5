"""The inspector's numbers against sizes worked out by hand."""

from pathlib import Path

import pytest

import moe_lab as lab
from moe_lab.inspect import COLUMNS, inspect_checkpoint, summary
from moe_lab.open import Checkpoint
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
