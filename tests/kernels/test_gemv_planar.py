"""The GEMV on planes: bits of its reference, of raw blocks where lanes hold the same values, and in one grid."""

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab.tolerances import tol
from moe_lab_kernels.gemv import gemv, lane_rows
from moe_lab_kernels.gemv import mlp as gemv_mlp
from moe_lab_kernels.gemv.mlp_call import Experts
from moe_lab_kernels.gemv.ref import Lanes
from moe_lab_kernels.gemv.tiles import Tile
from moe_lab_kernels.rows import activation, quantize_rows
from moe_lab_kernels.slots.pointer_table import PointerTable
from moe_lab_kernels.storage.blocks import BLOCKS, GEMV_FORMATS
from tests.support.kernel_cases import Guarded, gemv_case, nmse, same_bits, weights
from tests.support.planes import planes

pytestmark = pytest.mark.usefixtures("interpreter")
AS_RAW = ("q4_k", "q5_k", "q4_0", "mxfp4", "nvfp4")
# of a block, then of an odd number of them, in one step of the lanes or (q2_k, q8_0) in more
WIDTHS = {"q2_k": 2304, "q8_0": 1120, "q4_0": 544, "mxfp4": 544, "nvfp4": 576}
ROW_OF = torch.tensor([0, 2, 1, 2, 0], dtype=torch.int32)
OUT_ROW = torch.tensor([1, 2, 4, 3, 0], dtype=torch.int32)
# three rows that share a slot, one alone; a slot that is none, one that is not there, no rows. Pair 4 is in no chunk.
CHUNKS = torch.tensor([[1, 0, 3], [2, 3, 1], [-1, 4, 1], [5, 4, 1], [2, 0, 0]]).int()


@pytest.mark.parametrize("format", GEMV_FORMATS)
@pytest.mark.parametrize("counts", [[3, 8], [1]], ids=["one-block", "odd-blocks"])
def test_bits_of_the_reference(format: str, counts: list[int]) -> None:
    """Rows in value order and in lane order; 37 weight rows fill no tile, slots lie apart."""
    kd = BLOCKS[format].values if len(counts) > 1 else WIDTHS.get(format, 1280)
    case = gemv_case(format, 37, kd, counts, slots=2, x_rows=4)
    rows, w = (*case.rows, case.rows[1] * 5), planes(case.w, format)  # totals: any will do
    out, want = Guarded((len(case.row_of), 37), torch.float32, "cpu"), torch.empty(len(case.row_of), 37)
    gemv.gemv_ref(rows, case.row_of, w, case.chunks, format, want, layout="planar")
    assert want.isfinite().all()
    if len(counts) > 1:
        rows = lane_rows.to_lanes(rows, "planar " + format)
    gemv.gemv(rows, case.row_of, w, case.chunks, format, out.view, layout="planar")
    assert out.intact()
    assert same_bits(out.view, want)
    raw = gemv.gemv_ref(lane_rows.to_plain(rows), case.row_of, case.w, case.chunks, format, torch.empty_like(want))
    assert same_bits(want, raw) or format not in AS_RAW
    assert nmse(want, raw) <= tol("gemv/emulation"), "the integers are raw blocks'; only the order of additions differs"


def test_no_tile_chunk_or_address_shows() -> None:
    format, kd = "q8_0", 160
    raw = weights(format, 3, 20, kd)
    w, x = planes(raw, format), torch.randn(3, kd, generator=torch.Generator().manual_seed(1))
    rows = lane_rows.quantize_lanes(x, format, layout="planar")
    assert all(
        same_bits(a, b) for a, b in zip(lane_rows.to_plain(rows), quantize_rows.quantize_q8_1_ref(x), strict=True)
    )

    def run(weight, chunks=CHUNKS, **more) -> torch.Tensor:
        out = torch.full((5, 20), float("nan"))
        return gemv.gemv(rows, ROW_OF, weight, chunks, format, out, layout="planar", **more)

    want = run(w)
    assert want[4].isnan().all(), "a pair in no chunk was written"
    alone = torch.tensor([[1, 0, 1], [1, 1, 1], [1, 2, 1], [2, 3, 1]]).int()
    assert same_bits(run(w, alone, max_rows=1, tile=Tile(16, sums=8)), want)
    assert same_bits(run(PointerTable.of([w[:1], w[1:].clone()])), want)
    assert same_bits(run(w, out_row=OUT_ROW)[OUT_ROW[:4].long()], want[:4])
    both = torch.full((5, 20), float("nan"))
    assert same_bits(run(w, w2=w, out2=both), want)
    assert same_bits(both, want)


def test_experts_in_one_grid_have_the_bits_of_the_launches_they_replace() -> None:
    formats, d, f = ("q8_0", "q4_0"), 96, 160
    own = [planes(weights(fmt, 3, n, kd, seed), fmt) for seed, (fmt, n, kd) in
           enumerate(((formats[0], f, d), (formats[0], f, d), (formats[1], d, f)))]  # fmt: skip
    x, more = torch.randn(3, d, generator=torch.Generator().manual_seed(2)), {"max_rows": 4, "layout": "planar"}
    y = Guarded((5, d), torch.bfloat16, "cpu")
    gemv_mlp.gemv_mlp(x, ROW_OF, Experts(*own, *formats), CHUNKS, y.view, OUT_ROW, **more)
    assert y.intact()
    g, u = (torch.full((5, f), float("nan"), dtype=torch.bfloat16) for _ in range(2))
    rows = lane_rows.quantize_lanes(x, formats[0], layout="planar")
    gemv.gemv(rows, ROW_OF, own[0], CHUNKS, formats[0], g, w2=own[1], out2=u, **more)
    h = lane_rows.quantize_lanes(activation.swiglu(g, u), formats[1], layout="planar")
    want = torch.full((5, d), float("nan"), dtype=torch.bfloat16)
    gemv.gemv(h, torch.arange(5).int(), own[2], CHUNKS, formats[1], want, out_row=OUT_ROW, **more)
    assert same_bits(y.view, want)
    assert y.view[0].isnan().all(), "a pair in no chunk was written"
    ref = torch.full((5, d), float("nan"), dtype=torch.bfloat16)
    gemv_mlp.gemv_mlp_ref(x, ROW_OF, Experts(*own, *formats), CHUNKS, ref, OUT_ROW, **more)
    assert nmse(y.view[1:].float(), ref[1:].float()) <= tol("gemv/layer")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layout": "tiles"}, "layout raw or planar, got layout='tiles'"),
        ({"w": torch.zeros(2, 8, 84, dtype=torch.uint8)}, r"w must have shape \[S, 1, 672\]"),
        ({"w": torch.zeros(2, 1, 688, dtype=torch.uint8)}, r"w must have shape \[S, 1, 672\], got \[2, 1, 688\]"),
        ({"w": torch.zeros(2 * 680, dtype=torch.uint8).as_strided((2, 1, 672), (680, 1, 1))}, "multiples of 16 bytes"),
        ({"rows": "raw"}, "rows in lane order for q2_k .* met planar q2_k"),
        ({"tile": Tile(8, lanes=Lanes(32, 8))}, "4 lanes share a block of planar q2_k"),
    ],
    ids=["layout", "raw-blocks", "bytes", "slots-apart", "rows-for-raw", "lanes"],
)
def test_wrong_operands_are_refused_by_name(change: dict, why: str) -> None:
    x = torch.ones(3, 256)
    rows = lane_rows.quantize_lanes(x, "q2_k") if change.get("rows") == "raw" else quantize_rows.quantize_q8_1_ref(x)
    given = {"w": torch.zeros(2, 1, 672, dtype=torch.uint8), "out": torch.zeros(5, 8), "layout": "planar", **change}
    with pytest.raises(LabError, match=why):
        gemv.gemv(**{**given, "rows": rows, "row_of": ROW_OF, "chunks": CHUNKS, "format": "q2_k"})


def test_what_has_no_planes_is_refused() -> None:
    with pytest.raises(LabError, match="there is no planar form of 'iq4_nl'"):
        lane_rows.quantize_lanes(torch.ones(1, 256), "iq4_nl", layout="planar")
