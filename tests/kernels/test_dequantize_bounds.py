"""The decoding kernels read no byte behind the blocks: they end where a forbidden page begins."""

from tests.support.page_edge import run_program

PROGRAM = """
import torch
from tests.support.page_edge import at_the_edge
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.dequantize.dequantize import dequantize, dequantize_ref
from moe_lab_kernels.dequantize.planar import dequantize_planar
from moe_lab_kernels.storage.planar import repack, repack_ref, restore
from moe_lab_kernels.storage.planar_layout import PIECES

for format, block in BLOCKS.items():
    print(format, flush=True)
    for blocks in (1, 2, 4) if block.bytes % 4 else (4,):  # starts at every address modulo 4
        raw = torch.randint(120, (1, blocks * block.bytes), dtype=torch.uint8)
        edge = at_the_edge(raw)
        assert torch.equal(dequantize(edge, format, torch.float32), dequantize_ref(raw, format))
    if format in PIECES:
        kd = 4 * block.values
        planes = at_the_edge(repack(edge, format))
        assert torch.equal(planes, repack_ref(raw, format))
        assert torch.equal(restore(planes, format, 1, kd), raw)
        assert torch.equal(dequantize_planar(planes, format, 1, kd, torch.float32), dequantize_ref(raw, format))
"""


def test_no_read_behind_the_blocks() -> None:
    done = run_program(PROGRAM)
    assert done.returncode == 0, f"exit {done.returncode} at {done.stdout.split()[-1:]}: {done.stderr[-500:]}"
