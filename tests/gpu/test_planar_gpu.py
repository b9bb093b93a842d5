"""Kernels that read planes, on a GPU: the GEMV has its reference's bits, mmq and grouped have those of raw blocks."""

import pytest
import torch

from moe_lab.bench import gemv_layer as gl
from moe_lab.bench.workloads import LayerShape
from moe_lab_kernels.dequantize.planar import dequantize_planar
from moe_lab_kernels.gemv import gemv, lane_rows
from moe_lab_kernels.gemv.tiles import Tile
from moe_lab_kernels.grouped import decoded
from moe_lab_kernels.rows import quantize_rows
from moe_lab_kernels.slots.pointer_table import PointerTable
from moe_lab_kernels.storage.blocks import BLOCKS, GEMV_FORMATS
from tests.support.kernel_cases import same_bits, weights
from tests.support.mmq_cases import KINDS, mmq_case
from tests.support.planes import in_planes, planes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none"),
]
ROWS = [[n % 3, n * (n - 1) // 2, n] for n in range(1, 10)]  # chunks of one to nine rows


@pytest.mark.parametrize("format", GEMV_FORMATS)
@pytest.mark.parametrize("kd", [256, 704, 2304, 2880, 7168], ids="K{}".format)
def test_gemv_has_the_bits_of_its_reference(format: str, kd: int) -> None:
    """Chunks of one to nine rows, 100 weight rows; three times, each row alone, and in one width (another kernel each,
    which takes seconds to compile) in another tile and from addresses."""
    if kd % BLOCKS[format].values:
        pytest.skip(f"{kd} is not whole blocks of {format}")
    draw = torch.Generator().manual_seed(5)
    x = (torch.randn(9, kd, generator=draw) * torch.exp(torch.randn(9, 1, generator=draw))).bfloat16().cuda()
    raw = weights(format, 3, 100, kd).cuda()
    w, row_of = planes(raw, format), (torch.arange(45, device="cuda") * 5 % 9).int()
    rows = lane_rows.quantize_lanes(x, format, layout="planar")
    assert all(same_bits(a, b) for a, b in zip(lane_rows.to_plain(rows), quantize_rows.quantize_q8_1(x), strict=True))

    def run(op=gemv.gemv, weight=w, chunks=ROWS, **more) -> torch.Tensor:
        out = torch.full((45, 100), float("nan"), device="cuda")
        table = torch.tensor(chunks, dtype=torch.int32, device="cuda")
        return op(rows, row_of, weight, table, format, out, layout="planar", **more)

    want = run(gemv.gemv_ref)
    assert want.isfinite().all()
    for repeat in range(3):
        assert same_bits(run(), want), repeat
    if kd == (2304 if BLOCKS[format].values == 256 else 704):
        assert same_bits(run(tile=Tile(2, sums=4, registers=128)), want)
        assert same_bits(run(weight=PointerTable.of([w[:1], w[1:].clone()])), want)
    alone = [[n % 3, n * (n - 1) // 2 + i, 1] for n in range(1, 10) for i in range(n)]
    assert same_bits(run(chunks=alone, max_rows=1), want)
    if format in ("q4_k", "q5_k", "q4_0", "mxfp4", "nvfp4"):
        out = torch.empty_like(want)
        plain = lane_rows.to_plain(rows)
        gemv.gemv(plain, row_of, raw, torch.tensor(ROWS, dtype=torch.int32, device="cuda"), format, out)
        assert same_bits(out, want), "lanes hold the values that they hold of raw blocks"


PAIRS = ["q2_k+q3_k", "q4_k+q6_k", "q5_k+q5_k", "q8_0+q8_0", "q4_0+q4_0", "mxfp4+mxfp4", "nvfp4+nvfp4"]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("tokens", [1, 8])
def test_layers_in_one_grid_have_the_bits_of_their_products(pair: str, tokens: int) -> None:
    shape = LayerShape("test", 768, 256, 16, 6)
    w = gl.with_planes(gl.make_weights(shape, 3, "cuda", *pair.split("+")), shape)
    assert gl.check_form("planar", shape, w, tokens, 1, "cuda") == []


@pytest.mark.parametrize("pair", ["q2_k+q3_k", "q8_0+q8_0"])
def test_a_token_has_its_own_bits_100_times(pair: str) -> None:
    shape = LayerShape("test", 2048, 768, 64, 8)
    w = gl.with_planes(gl.make_weights(shape, 3, "cuda", *pair.split("+")), shape)
    ids = torch.rand(8, 64, generator=torch.Generator().manual_seed(1)).topk(8).indices.int()
    c = gl.make_call(shape, ids, torch.rand(8, 8, generator=torch.Generator().manual_seed(2)), "cuda")
    assert gl.alone(c, w, gl.layer_planar, shape)
    want = gl.layer_planar(c, w).clone()
    assert all(torch.equal(gl.layer_planar(c, w), want) for _ in range(100))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [16, 128], ids="tile{}".format)
def test_mmq_has_raw_blocks_bits(kind: str, tokens: int) -> None:
    case = mmq_case(kind, 200, 1024, [2, 0, 150, 1], tokens=tokens, device="cuda")
    want = case.product()
    case.gate = in_planes(case.gate)
    got = case.product()
    assert got.intact()
    assert same_bits(got.view, want.view)


@pytest.mark.parametrize("format", GEMV_FORMATS)
def test_slots_are_decoded_to_raw_blocks_values(format: str) -> None:
    case = mmq_case(f"{format}-d4", 100, 1024, [1, 1, 1, 1, 1], device="cuda")
    raw, lying = case.gate._replace(data=case.gate.data.contiguous()), in_planes(case.gate)
    rooms = [torch.empty(decoded.scratch_values(raw, 3), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for first in (0, 3):
        got, want = (decoded.decode_slots(w, first, 3, room) for w, room in zip((lying, raw), rooms, strict=True))
        assert torch.equal(got.data, want.data)
    values = dequantize_planar(lying.data[:, 0], format, 100, 1024)
    assert torch.equal(values[3:], rooms[1].view(3, 100, 1024)[:2])
