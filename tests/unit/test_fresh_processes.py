"""Fault G19 on a CPU: three fresh processes choose alike and give the same bits; what was chosen is in the record."""

from pathlib import Path

import torch

from moe_lab.formats import get_format
from moe_lab.parity import wide_layer
from moe_lab_kernels.backend import LaunchCount, record_launches
from moe_lab_kernels.grouped.grouped_gemm import grouped_gate_up
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.grouped.tiles import WorkList
from moe_lab_kernels.launch.table import looked_up_for, table
from tests.support.fresh_process import said_thrice


def test_three_processes_agree(tmp_path: Path) -> None:
    first, *others = said_thrice("cpu", tmp_path)
    assert others == [first, first]
    assert [said[1] for name, said in first.items() if name.startswith("auto")] == ["gemv", "gemv"]


def test_the_compiled_kernels_tile_is_read_off_its_launch() -> None:
    """What a device's table says is what the launch has, and what its count says."""
    entry = next(e for e in table("NVIDIA H200") if e.kernel == "grouped" and e.gated and "rows" in e.cut)
    data = torch.zeros(1, entry.n, get_format(entry.format).row_bytes(entry.kd), dtype=torch.uint8)
    x = torch.zeros(entry.tokens, entry.kd, dtype=torch.bfloat16)
    work = WorkList(torch.tensor([[0, 0, entry.tokens]], dtype=torch.int32), entry.tokens)
    weight, out = Weight(data, entry.format, entry.kd), torch.empty(entry.tokens, entry.n)
    with looked_up_for("NVIDIA H200"), record_launches() as made:
        grouped_gate_up(x, None, weight, weight, work, out)
    count = LaunchCount()
    for launch in made:
        count.note(launch.kernel, launch.args, launch.meta)
    (said,) = (part for part in count.tiles.split("; ") if part.startswith("grouped "))
    words = dict(word.split("=") for word in said.split()[1:])
    wanted = (entry.format, str(entry.tokens), str(entry.cut["rows"]))
    assert (words["format"], words["tokens"], words["rows"]) == wanted
    assert words["num_warps"] == str(entry.cut.get("warps", words["num_warps"]))


def test_no_kernel_has_no_tile() -> None:
    y = wide_layer(d_model=256, d_expert=256)(torch.zeros(2, 256), "gemv")
    assert (y.timing.backend, y.timing.tiles, y.timing.layout) == ("torch", "", "raw")
