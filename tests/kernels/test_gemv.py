"""The grouped GEMV: bits of its reference, closeness to float64, and what it must never touch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_lab.errors import LabError, LabTypeError
from moe_lab.tolerances import tol
from moe_lab_kernels import backend
from moe_lab_kernels.gemv import gemv
from moe_lab_kernels.storage.blocks import BLOCKS
from tests.support.kernel_cases import DTYPES, GUARD, among_poison, gemv_case, nmse, same_bits

pytestmark = pytest.mark.usefixtures("interpreter")
FORMATS = ("q2_k", "q3_k", "q8_0")
COUNTS = {
    "T0": [],
    "T1": [1],
    "T7": [7],
    "T8": [8],
    "T9": [8, 1],
    "T37-skewed": [8, 8, 8, 8, 5],
    "empty-expert": [3, 0, 5, 0],
}


@pytest.mark.parametrize(
    ("format", "name"),
    [
        *(("q8_0", name) for name in COUNTS),
        *((f, name) for f in ("q2_k", "q3_k") for name in COUNTS if name != "T37-skewed"),
    ],
)
def test_bits_of_the_reference(format: str, name: str) -> None:
    case = gemv_case(format, 60, 256, COUNTS[name])
    got, want = case.run(), case.run(gemv.gemv_ref)
    assert same_bits(got.view, want.view)
    assert got.intact()
    assert got.view.isfinite().all(), "a poisoned element was not written"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("n", [1, 60, 704], ids="N{}".format)
def test_widths_that_fill_no_tile(format: str, n: int) -> None:
    case = gemv_case(format, n, 512, [3])
    assert same_bits(case.run().view, case.run(gemv.gemv_ref).view)


@pytest.mark.parametrize(
    ("format", "kd"), [("q2_k", 1280), ("q3_k", 2304), ("q8_0", 32), ("q8_0", 704), ("q8_0", 1408), ("q8_0", 2880)]
)
def test_depths_that_fill_no_step(format: str, kd: int) -> None:
    case = gemv_case(format, 17, kd, [1, 2])
    assert same_bits(case.run().view, case.run(gemv.gemv_ref).view)


def test_one_expert_takes_all_199_rows() -> None:
    case = gemv_case("q8_0", 24, 64, [8] * 24 + [7], slots=1)
    assert same_bits(case.run().view, case.run(gemv.gemv_ref).view)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kd", [256, 2048, 7168], ids="K{}".format)
def test_reference_against_float64(format: str, kd: int) -> None:
    case = gemv_case(format, 33, kd, [8, 3])
    assert nmse(case.run(gemv.gemv_ref).view, case.exact()) <= tol("gemv/emulation")


def emulated(format: str, raw: np.ndarray, codes: np.ndarray, d8: np.ndarray) -> np.float32:
    """One output by the decode arm's formula over 16-value sub-blocks, element by element, summed in plain order."""
    total = np.float32(0)
    size, width = BLOCKS[format].bytes, BLOCKS[format].values
    for b in range(len(codes) // width):
        block, x = raw[b * size : (b + 1) * size], codes[b * width : (b + 1) * width].astype(int)
        scales = d8[b * width // 32 : (b + 1) * width // 32].astype(np.float32)
        if format == "q8_0":
            d, q = block[:2].view(np.float16)[0].astype(np.float32), block[2:].view(np.int8).astype(int)
            total += d * scales[0] * np.float32(q @ x)
            continue
        main, low = np.float32(0), np.float32(0)
        for s in range(16):
            e = np.arange(16 * s, 16 * s + 16)
            h, j, lane = e // 128, e % 128 // 32, e % 32
            part = x[e]
            if format == "q2_k":
                q, sc, m = block[16 + 32 * h + lane] >> 2 * j & 3, int(block[s] & 15), int(block[s] >> 4)
                low += scales[s // 2] * np.float32(m * part.sum())
            else:
                q = (block[32 + 32 * h + lane] >> 2 * j & 3).astype(int) + 4 * (block[lane] >> e // 32 & 1) - 4
                nibble = block[96 + s % 8] >> 4 * (s // 8) & 15
                sc = int(nibble | (block[104 + s % 4] >> 2 * (s // 4) & 3) << 4) - 32
            main += scales[s // 2] * np.float32(sc * (q.astype(int) @ part))
        at = 80 if format == "q2_k" else 108
        total += block[at : at + 2].view(np.float16)[0].astype(np.float32) * main
        if format == "q2_k":
            total -= block[82:84].view(np.float16)[0].astype(np.float32) * low
    return total


@pytest.mark.parametrize("format", FORMATS)
def test_reference_against_the_formula_written_out(format: str) -> None:
    case = gemv_case(format, 12, 768, [2])
    got = case.run(gemv.gemv_ref).view
    codes, scale = (t.numpy() for t in case.rows)
    row = case.row_of.tolist()
    want = [[emulated(format, case.w[0, n].numpy(), codes[r], scale[r]) for n in range(12)] for r in row]
    assert nmse(got, torch.tensor(np.array(want))) <= tol("gemv/emulation")


def test_extreme_codes_and_scales_stay_exact() -> None:
    """Every byte 0xFF or 0x80: the largest integers a lane can meet."""
    for format, at in (("q2_k", 80), ("q3_k", 108), ("q8_0", 0)):
        for fill, code in ((255, 127), (255, -127), (0x80, 127), (0x7F, -127)):
            case = gemv_case(format, 9, 256, [2])
            blocks = case.w.view(*case.w.shape[:2], -1, BLOCKS[format].bytes)
            blocks.fill_(fill)
            blocks[..., at : at + (4 if format == "q2_k" else 2)] = torch.tensor(
                [0, 60] * (2 if format == "q2_k" else 1), dtype=torch.uint8
            )
            case.rows[0].fill_(code)
            assert same_bits(case.run().view, case.run(gemv.gemv_ref).view)
            assert nmse(case.run(gemv.gemv_ref).view, case.exact()) <= tol("gemv/emulation")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_store_rounds_to_nearest_even_once(dtype: str) -> None:
    case = gemv_case("q2_k", 60, 256, [8], dtype=dtype)
    exact = replace(case, dtype=torch.float32).run().view
    assert same_bits(case.run().view, exact.to(DTYPES[dtype]))


def test_two_weights_in_one_launch() -> None:
    case = gemv_case("q2_k", 60, 256, [3, 2])
    second, out2 = case.w.flip(1).contiguous(), torch.full((5, 60), float("nan"))
    with backend.count_launches() as count:
        got = replace(case, extra={"w2": second, "out2": out2}).run()
    assert (count.launches, dict(count.by_kernel)) == (1, {"_gemv": 1})
    assert same_bits(got.view, case.run().view)
    assert same_bits(out2, replace(case, w=second).run().view)


def test_pairs_go_where_they_are_sent() -> None:
    case = gemv_case("q8_0", 24, 64, [3, 5])
    to = torch.tensor([7, 0, 3, 1, 2, 9, 4, 5], dtype=torch.int32)
    out = torch.full((11, 24), float("nan"))
    gemv.gemv(case.rows, case.row_of, case.w, case.chunks, "q8_0", out, out_row=to)
    assert same_bits(out[to.long()], case.run().view)
    assert out[[6, 8, 10]].isnan().all()


@pytest.mark.parametrize("format", FORMATS)
def test_an_arena_slot_is_read_in_place(format: str) -> None:
    """Slots farther apart than their bytes, rows padded, bytes between them poisoned."""
    case = gemv_case(format, 20, 256, [2, 3])
    s, n, row = case.w.shape
    arena = torch.full((s, n * (row + 12) + 88), 255, dtype=torch.uint8)
    view = arena[:, 4 : 4 + n * (row + 12)].unflatten(1, (n, row + 12))[..., :row]
    view.copy_(case.w)
    assert same_bits(replace(case, w=view).run().view, case.run().view)


def test_rows_of_a_wider_buffer() -> None:
    case = gemv_case("q3_k", 20, 256, [4])
    codes, scale = (torch.cat([t, t], 1)[:, : t.shape[1]] for t in case.rows)
    out = torch.full((4, 33), float("nan"))
    gemv.gemv((codes, scale), case.row_of, case.w, case.chunks, "q3_k", out[:, 7:27])
    assert same_bits(out[:, 7:27], case.run().view)
    assert out[:, :7].isnan().all()
    assert out[:, 27:].isnan().all()


def test_chunks_that_mean_nothing_write_nothing() -> None:
    case = gemv_case("q8_0", 24, 64, [2, 2])
    padded = torch.tensor([*case.chunks.tolist(), [-1, 0, 2], [3, 0, 2], [0, 0, 0], [0, 0, -1]], dtype=torch.int32)
    assert same_bits(replace(case, chunks=padded).run().view, case.run().view)
    nothing = replace(case, chunks=padded[4:]).run()
    assert nothing.view.isnan().all()


def test_pairs_and_rows_out_of_range_are_not_followed() -> None:
    case = gemv_case("q8_0", 24, 64, [3])
    beyond = torch.tensor([[0, 2, 5]], dtype=torch.int32)
    got = replace(case, chunks=beyond).run()
    assert got.view[:2].isnan().all()
    assert got.view[2].isfinite().all()
    assert got.intact()
    row_of = torch.tensor([0, -1, 99], dtype=torch.int32)
    for op in (gemv.gemv, gemv.gemv_ref):
        assert replace(case, row_of=row_of).run(op).view[1:].eq(0).all()


def test_what_does_not_fit_is_refused_by_name() -> None:
    case = gemv_case("q2_k", 20, 256, [2])
    (codes, scale), out = case.rows, torch.zeros(2, 20)

    def run(**change):
        a = {"rows": case.rows, "row_of": case.row_of, "w": case.w, "chunks": case.chunks, "format": "q2_k", "out": out}
        return gemv.gemv(**{**a, **change})

    with pytest.raises(LabError, match=r"no kernel multiplies 'q9_k' as it lies; .* for q2_k, q3_k, q4_k"):
        run(format="q9_k")
    with pytest.raises(LabError, match=r"w must have shape \[S, 20, 110\], got \[3, 20, 84\]"):
        run(format="q3_k")
    with pytest.raises(LabError, match="whole blocks of 256 values, got Kd=224"):
        run(rows=(codes[:, :224], scale[:, :7]))
    with pytest.raises(LabTypeError, match=r"chunks must be int32, got torch\.int64"):
        run(chunks=case.chunks.long())
    with pytest.raises(LabError, match=r"out must have shape \[2, 20\], got \[3, 20\]"):
        run(out=torch.zeros(3, 20))
    with pytest.raises(LabError, match="w2 and out2 come together"):
        run(w2=case.w)
    with pytest.raises(LabError, match="max_rows=3"):
        run(max_rows=3)
    with pytest.raises(LabError, match=r"w's last axis must be contiguous.*strides"):
        run(w=case.w.transpose(1, 2).contiguous().transpose(1, 2))
    shifted = (
        among_poison(case.w, 0).new_zeros(case.w.numel() + 2 * GUARD)[GUARD + 2 :][: case.w.numel()].view(case.w.shape)
    )
    with pytest.raises(LabError, match="w's rows must start at multiples of 4 bytes"):
        run(w=shifted)
    with pytest.raises(LabError, match="codes's last axis must be contiguous"):
        run(rows=(torch.cat([codes, codes], 1)[:, ::2], scale))
