"""Fault G19 on a CPU: three fresh processes choose alike and give the same bits; what was chosen is in the record."""

from pathlib import Path

import pytest
import torch

from moe_lab.formats import get_format
from moe_lab.parity import wide_layer
from moe_lab_kernels.backend import LaunchCount, record_launches
from moe_lab_kernels.grouped.grouped_gemm import grouped_gate_up
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.grouped.tiles import WorkList
from moe_lab_kernels.launch.table import Entry, forget, looked_up_for, own_path, write_table
from tests.support.fresh_process import said_thrice


def test_three_processes_agree(tmp_path: Path) -> None:
    first, *others = said_thrice("cpu", tmp_path)
    assert others == [first, first]
    assert [said[1] for name, said in first.items() if name.startswith("auto")] == ["gemv", "gemv"]


def test_the_compiled_kernels_tile_is_read_off_its_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device's table says is what the launch has, and what its count says."""
    monkeypatch.setenv("MOE_LAB_CACHE", str(tmp_path))
    entry = Entry("grouped", "q4_k", 64, True, 256, 256, {"rows": 128, "warps": 8, "stages": 2}, 9.0, 10.0)
    weight = Weight(torch.zeros(1, 256, get_format("q4_k").row_bytes(256), dtype=torch.uint8), "q4_k", 256)
    x, out = torch.zeros(64, 256, dtype=torch.bfloat16), torch.empty(64, 256)
    work = WorkList(torch.tensor([[0, 0, 64]], dtype=torch.int32), 64)
    said = []
    for entries in ([entry], []):
        write_table(own_path("A Card"), "A Card", entries, {})
        with looked_up_for("A Card"), record_launches() as made:
            grouped_gate_up(x, None, weight, weight, work, out)
        count = LaunchCount()
        for launch in made:
            count.note(launch.kernel, launch.args, launch.meta)
        (line,) = (part for part in count.tiles.split("; ") if part.startswith("grouped "))
        said.append(dict(word.split("=") for word in line.split()[1:]))
    forget()
    assert {name: said[0][name] for name in ("format", "tokens", "rows", "num_warps", "num_stages")} == {
        "format": "q4_k", "tokens": "64", "rows": "128", "num_warps": "8", "num_stages": "2"
    }  # fmt: skip
    assert said[0] != said[1], "the built-in tile is the table's"


def test_no_kernel_has_no_tile() -> None:
    y = wide_layer(d_model=256, d_expert=256)(torch.zeros(2, 256), "gemv")
    assert (y.timing.backend, y.timing.tiles, y.timing.layout) == ("torch", "", "raw")
