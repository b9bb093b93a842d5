"""Every format the GEMV multiplies: bits of the reference in value and in lane order, the decode arm's formula."""

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab.tolerances import tol
from moe_lab_kernels.gemv import gemv, lane_rows
from moe_lab_kernels.gemv.ref import Lanes, lanes_of
from moe_lab_kernels.rows import quantize_rows
from moe_lab_kernels.storage.blocks import BLOCKS, GEMV_FORMATS
from moe_lab_kernels.storage.unpack import unpack_ref
from tests.support.kernel_cases import gemv_case, nmse, same_bits, weights

pytestmark = pytest.mark.usefixtures("interpreter")
ADDED = [f for f in GEMV_FORMATS if f not in ("q2_k", "q3_k", "q8_0")]  # those three have files of their own
WIDTHS = {"q4_0": 672, "mxfp4": 672, "nvfp4": 704}


def operands(format: str, kd: int, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(rows, kd, generator=draw) * torch.exp(torch.randn(rows, 1, generator=draw))
    return x, weights(format, 2, 20, kd), torch.tensor([[1, 0, 2], [0, 2, 1]], dtype=torch.int32)


def run(op, rows, w, chunks, format, **options) -> torch.Tensor:
    out = torch.full((3, w.shape[1]), float("nan"))
    return op(rows, torch.tensor([2, 0, 1], dtype=torch.int32), w, chunks, format, out, **options)


def formula(format: str, raw: torch.Tensor, rows) -> torch.Tensor:
    """float64 [R, N] of the decode arm's products as ggml writes them, block by block."""
    u, (codes, d8, total) = unpack_ref(raw, format), (t.double() for t in rows)
    values = BLOCKS[format].values
    codes, d8 = codes.unflatten(1, (-1, values)), d8.unflatten(1, (-1, values // 32))
    groups = u.d.shape[-1] if u.scales is None else u.scales.shape[-1]
    q = u.codes.double().unflatten(-1, (groups, -1))
    x = codes.unflatten(-1, (groups, -1))
    each = d8.repeat_interleave(max(1, groups * 32 // values), -1)[..., :groups]
    if format == "q4_0":
        whole = torch.einsum("nbgi,rbgi->rnbg", q + 8, x)
        part = u.d.double() * (each[:, None] * whole - 8 * total[:, None, :, None])
        return part.sum((-1, -2))
    dot = torch.einsum("nbgi,rbgi->rnbg", q, x) * each[:, None]
    out = ((u.d.double() if u.scales is None else u.d.double() * u.scales.double()) * dot).sum((-1, -2))
    if u.mins is not None:
        least = torch.einsum("nbg,rbg->rnbg", u.mins.double(), x.sum(-1) * each)
        out = out - (u.dmin.double() * least).sum((-1, -2))
    return out


@pytest.mark.parametrize("format", ADDED)
def test_bits_of_the_reference_in_both_orders(format: str) -> None:
    kd = WIDTHS.get(format, 768)
    x, w, chunks = operands(format, kd)
    plain = quantize_rows.quantize_q8_1(x)
    want = run(gemv.gemv_ref, plain, w, chunks, format)
    assert want.isfinite().all()
    assert same_bits(run(gemv.gemv, plain, w, chunks, format), want)
    assert same_bits(run(gemv.gemv, lane_rows.quantize_lanes(x, format), w, chunks, format), want)


# rows of the chunks that meet each width: together 1 to 9, nine being a chunk of eight and one of one
CHUNKS = {256: [2, 3, 6, 8, 1], 704: [4], 2304: [5], 2880: [7]}
CHUNKS_OF_256 = {256: [2, 3, 4, 6, 7, 8, 1], 2304: [5]}
ALLOWED = [(f, kd) for f in GEMV_FORMATS for kd in (CHUNKS_OF_256 if BLOCKS[f].values == 256 else CHUNKS)]


@pytest.mark.parametrize(("format", "kd"), ALLOWED, ids=str)
def test_bits_of_the_reference_for_one_to_nine_rows(format: str, kd: int) -> None:
    counts = (CHUNKS_OF_256 if BLOCKS[format].values == 256 else CHUNKS)[kd]
    case = gemv_case(format, 2, kd, counts, slots=1, x_rows=3)
    case.rows = (*case.rows, case.rows[1] * 5)  # totals, of which any will do
    got, want = case.run(), case.run(gemv.gemv_ref)
    assert same_bits(got.view, want.view)
    assert got.intact()
    assert got.view.isfinite().all(), "a poisoned element was not written"


@pytest.mark.parametrize("format", ["q2_k", "q3_k", "q8_0"])
def test_lane_order_does_not_show(format: str) -> None:
    x, w, chunks = operands(format, 768)
    want = run(gemv.gemv_ref, quantize_rows.quantize_q8_1(x), w, chunks, format)
    assert same_bits(run(gemv.gemv, lane_rows.quantize_lanes(x, format), w, chunks, format), want)


@pytest.mark.parametrize("format", GEMV_FORMATS)
def test_reference_is_the_decode_arms_formula(format: str) -> None:
    kd = 2048
    x, w, chunks = operands(format, kd)
    rows = quantize_rows.quantize_q8_1_ref(x)
    got = run(gemv.gemv_ref, rows, w, chunks, format)
    want = torch.cat([formula(format, w[1], [t[[2, 0]] for t in rows]), formula(format, w[0], [t[[1]] for t in rows])])
    assert nmse(got, want) <= tol("gemv/emulation")


@pytest.mark.parametrize("format", ADDED)
@pytest.mark.parametrize("code", [127, -127])
def test_extreme_codes_and_scales_stay_exact(format: str, code: int) -> None:
    """Blocks of bytes 0xFF and 0x87 with a scale of one: the largest integers a lane can meet."""
    case = gemv_case(format, 8, 512, [1], slots=2, x_rows=3)
    blocks = case.w.view(*case.w.shape[:2], -1, BLOCKS[format].bytes)
    one = {"q4_k": (0, 4), "q5_k": (0, 4), "q6_k": (208, 2), "q4_0": (0, 2), "mxfp4": (0, 1), "nvfp4": (0, 4)}
    at, size = one[format]
    byte = {"mxfp4": [128], "nvfp4": [0x7E] * 4}.get(format, [0, 60] * (size // 2))
    for fill in (0xFF, 0x87):
        blocks.fill_(fill)
        blocks[..., at : at + size] = torch.tensor(byte, dtype=torch.uint8)
        rows = (torch.full_like(case.rows[0], code), torch.ones_like(case.rows[1]), torch.full_like(case.rows[1], 9.0))
        got, want = (run(op, rows, case.w, case.chunks, format)[:1] for op in (gemv.gemv, gemv.gemv_ref))
        assert same_bits(got, want)
        assert nmse(want, formula(format, case.w[0], rows)[:1]) <= tol("gemv/emulation")


@pytest.mark.parametrize("format", GEMV_FORMATS)
def test_lane_order_is_a_permutation_that_the_kernel_shares(format: str) -> None:
    kd = WIDTHS.get(format, 2304)
    index = lane_rows.lane_index(format, kd, lanes_of(format, kd))
    assert sorted(index[index >= 0].tolist()) == list(range(kd))
    x = torch.randn(2, kd, generator=torch.Generator().manual_seed(1)).bfloat16()
    got, want = lane_rows.quantize_lanes(x, format), lane_rows.quantize_lanes_ref(x, format)
    assert same_bits(got.codes[:, index >= 0], want.codes[:, index >= 0])
    assert all(same_bits(a, b) for a, b in zip(lane_rows.to_plain(got), quantize_rows.quantize_q8_1(x), strict=True))


def test_what_does_not_fit_is_refused_by_name() -> None:
    x, w, chunks = operands("q4_0", 672)
    rows = quantize_rows.quantize_q8_1(x)
    with pytest.raises(LabError, match=r"q4_0 needs rows of \(codes, scale, total\), got 2"):
        run(gemv.gemv, rows[:2], w, chunks, "q4_0")
    with pytest.raises(LabError, match=r"lane order for mxfp4 and .* met q4_0"):
        run(gemv.gemv, lane_rows.quantize_lanes(x, "mxfp4"), w, chunks, "q4_0")
    with pytest.raises(LabError, match="whole blocks of 256 values, got Kd=672"):
        lane_rows.quantize_lanes(x, "q6_k")
    with pytest.raises(LabError, match="has no lane order"):
        lane_rows.quantize_lanes(torch.zeros(1, 256), "q2_k", lanes=Lanes(8, 8))
