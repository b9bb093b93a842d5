"""The float GEMV has its reference's bits: every format, chunks of 1 to 9 rows, any tile; and what it refuses."""

import functools

import pytest
import torch

from moe_lab.errors import LabError, LabTypeError
from moe_lab.tolerances import tol
from moe_lab_kernels.gemv import chunk_bias
from moe_lab_kernels.gemv_float import gemv_float as gf
from moe_lab_kernels.gemv_float import tiles
from moe_lab_kernels.gemv_float.operands import Bias, Gate, Pairs, Rows
from moe_lab_kernels.gemv_float.ref import values_ref
from moe_lab_kernels.gemv_float.tiles import FloatTile
from moe_lab_kernels.rows import activation
from tests.support import float_cases as fc
from tests.support.kernel_cases import Guarded, among_poison, nmse, same_bits, worst_relative

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
N = 5


def same(rows: Rows, pairs: Pairs, w, dtype: torch.dtype = F32, **options) -> Guarded:
    got, want = (fc.product(op, rows, pairs, w, dtype, **options) for op in (gf.gemv_float, gf.gemv_float_ref))
    assert same_bits(got.view, want.view)
    assert got.intact()
    return got


@pytest.mark.parametrize(("format", "kd"), fc.cases(), ids=lambda v: str(v))
def test_bits_of_the_reference(format: str, kd: int) -> None:
    rows, pairs, w = fc.rows_of(9, kd, BF16), fc.pairs_of(fc.CHUNKS[kd], 9), fc.weight(format, N, kd)
    got = same(rows, pairs, w).view
    slot = torch.cat([torch.full((n,), s) for s, _, n in pairs.chunks.tolist() if 0 <= s < 2])
    want = torch.stack(
        [rows.x[r].float() @ values_ref(w, s).T for r, s in zip(pairs.row_of, slot.tolist(), strict=True)]
    )
    assert nmse(got, want) <= tol("gemv/float product")


@pytest.mark.parametrize("dtype", [F32, F16, E4M3], ids=["f32", "f16", "e4m3"])
@pytest.mark.parametrize("format", ["f32", "f16", "fp8_block", "int4_g64", "q4_0"])
def test_every_kind_of_row(format: str, dtype: torch.dtype) -> None:
    kd = 704
    same(fc.rows_of(3, kd, dtype), fc.pairs_of((3, 1), 3), fc.weight(format, N, kd), BF16)


@pytest.mark.parametrize("tile", fc.TILES, ids=lambda t: f"{t.rows}x{t.sums}-{t.shared}")
def test_no_tile_changes_a_bit(tile: FloatTile) -> None:
    same(fc.rows_of(5, 512, BF16), fc.pairs_of((1, 7), 5), fc.weight("bf16", N, 512), tile=tile)


def test_the_cut_follows_sizes() -> None:
    """qwen3's programs of down have no place all at once in four rows, gpt-oss's do; mixtral's chunks share codes."""
    cut = functools.partial(tiles.tile_for, "bf16", on="cuda", device=torch.device("cpu"))
    assert cut(2048, 8, 8, 1, gated=False) == tiles.DOWN_ONE_TALL
    assert cut(2880, 4, 4, 1, gated=False) == tiles.DOWN_ONE
    assert cut(2048, 64, 64, 8, gated=False) == tiles.DOWN_MANY
    assert cut(4096, 8, 16, 8, gated=False) == tiles.DOWN_MANY_FULL
    assert tiles.tile_for("iq4_nl", 2048, 8, 8, 1, gated=False, on="cuda", device=torch.device("cpu")) == tiles.DOWN_ONE
    assert (cut(768, 8, 8, 1, gated=True), cut(768, 64, 64, 8, gated=True)) == (tiles.GATE_ONE, tiles.GATE_MANY)


@pytest.mark.parametrize("format", ["bf16", "int8_g32"])
def test_a_row_alone_has_the_bits_it_has_among_eight(format: str) -> None:
    rows, w = fc.rows_of(8, 256, BF16), fc.weight(format, N, 256)
    together = fc.product(gf.gemv_float, rows, fc.pairs_of((8,), 8), w).view
    for max_rows in (1, 8):
        table = torch.tensor([[0, p, 1] for p in range(8)], dtype=torch.int32)
        alone = Pairs(fc.pairs_of((8,), 8).row_of, table, max_rows)
        assert same_bits(fc.product(gf.gemv_float, rows, alone, w).view, together)


def test_biases_scatter_strides_and_rows_that_are_not_there() -> None:
    kd, wide = 256, fc.weight("bf16", 2 * N, 256)
    w = wide._replace(data=wide.data[:, ::2])
    rows = Rows(among_poison(fc.rows_of(9, kd, BF16).x, float("inf"))[:, :kd])
    pairs = fc.pairs_of((2, 3), 9)
    pairs = pairs._replace(to=torch.tensor([4, 0, 3, 1, 2], dtype=torch.int32))
    pairs.row_of[1], pairs.row_of[2] = -1, 9
    values = torch.randn(7, N).half()
    bias = Bias(values, torch.tensor([0, 0, 0, 6, 2], dtype=torch.int32))
    got = same(rows, pairs, w, BF16, bias=bias).view
    assert torch.equal(got[0], values[6].float().to(BF16))
    same(rows, pairs, w, F16, bias=Bias(values[:2]))


def test_pairs_in_no_chunk_are_left_alone() -> None:
    w, rows = fc.weight("int4_g64", N, 256), fc.rows_of(4, 256, BF16)
    table = torch.tensor([[1, 1, 2], [0, 3, 9], [2, 0, 1]], dtype=torch.int32)
    got = same(rows, Pairs(torch.arange(4).int(), table), w).view
    assert got[0].isnan().all()
    assert got[1:].isfinite().all()
    empty = same(rows, Pairs(torch.arange(4).int(), table[:0]), w).view
    assert empty.isnan().all()


def test_a_nan_row_spoils_itself_alone() -> None:
    w, x = fc.weight("q8_0", N, 256), fc.rows_of(4, 256, BF16).x
    clean = fc.product(gf.gemv_float, Rows(x), fc.pairs_of((4,), 4), w).view
    x = x.clone()
    x[2, 100] = float("nan")
    got, row_of = fc.product(gf.gemv_float, Rows(x), fc.pairs_of((4,), 4), w).view, fc.pairs_of((4,), 4).row_of
    assert got[row_of == 2].isnan().all()
    assert same_bits(got[row_of != 2], clean[row_of != 2])


HOWS = {
    "swiglu": Gate(),
    "swiglu-before": Gate(limit=1.0),
    "swiglu-after": Gate(limit=0.5, limit_mode="after"),
    "oai": Gate(limit=1.0, limit_mode="oai", alpha=1.5),
    "geglu-before": Gate(gelu=True, limit=1.0),
}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
@pytest.mark.parametrize("weighed", [False, True], ids=["plain", "weighed"])
def test_hidden_rows_are_those_of_three_launches(how: Gate, weighed: bool) -> None:
    kd, rows, pairs = 256, fc.rows_of(9, 256, BF16), fc.pairs_of((3, 2), 9)
    gate, up = fc.weight("fp8_block", N, kd), fc.weight("fp8_block", N, kd, seed=1)
    biases = [Bias(torch.randn(2, N, generator=torch.Generator().manual_seed(i))) for i in range(2)]
    how = how._replace(weight=torch.rand(5) + 0.5 if weighed else None)
    more = {"how": how, "gate_bias": biases[0], "up_bias": biases[1]}
    got = fc.hidden(gf.gemv_float_gated, rows, pairs, gate, up, BF16, **more)
    assert got.intact()
    g, u = (
        fc.product(gf.gemv_float, rows, pairs, w, BF16, bias=b).view for w, b in zip((gate, up), biases, strict=True)
    )
    more = {"limit": how.limit, "limit_mode": how.limit_mode}
    if how.gelu:
        h = activation.geglu(g.float(), u.float(), **more)
    else:
        h = activation.swiglu(g.float(), u.float(), alpha=how.alpha, **more)
    h = h if how.weight is None else h * how.weight[:, None]
    assert same_bits(got.view, h.to(BF16))
    ref = fc.hidden(
        gf.gemv_float_gated_ref, rows, pairs, gate, up, BF16, how=how, gate_bias=biases[0], up_bias=biases[1]
    )
    assert worst_relative(got.view, ref.view) <= tol("activation/bf16")


def test_chunk_bias_has_the_bits_of_its_reference() -> None:
    y, values, pairs = torch.randn(6, 70), torch.randn(5, 70).to(BF16), fc.pairs_of((4, 2), 6)
    whose = torch.tensor([0, 0, 0, 4, 1], dtype=torch.int32)
    to = torch.tensor([5, 4, 3, 2, 1, 0], dtype=torch.int32)
    made = []
    for op in (chunk_bias.chunk_bias, chunk_bias.chunk_bias_ref):
        for more in ({"row_of": whose, "to": to, "n_slots": 2}, {"n_slots": 2}):
            out = Guarded((6, 70), BF16, "cpu")
            op(y, pairs.chunks, values, out.view, **more)
            assert out.intact()
            made.append(out.view)
    assert same_bits(made[0], made[2])
    assert same_bits(made[1], made[3])
    assert torch.equal(made[1][5], (y[5] + values[1].float()).to(BF16))
    with pytest.raises(LabError, match="9 slots but 5 biases"):
        chunk_bias.chunk_bias(y, pairs.chunks, values, torch.empty(6, 70), n_slots=9)


@pytest.mark.wrong_types
def test_what_does_not_fit_is_refused_before_a_launch() -> None:
    w, rows, pairs = fc.weight("int4_g64", N, 256), fc.rows_of(4, 256, BF16), fc.pairs_of((4,), 4)
    out = torch.empty(4, N)
    for error, match, call in (
        (LabError, "there are kernels for", lambda: gf.gemv_float(rows, pairs, w._replace(format="mine"), out)),
        (
            LabError,
            "multiples of 64 values here, got Kd=32",
            lambda: gf.gemv_float(rows, pairs, w._replace(kd=32), out),
        ),
        (LabError, "int4_g64 wants a second", lambda: gf.gemv_float(rows, pairs, w._replace(second=None), out)),
        (LabError, "x must have shape", lambda: gf.gemv_float(Rows(rows.x[:, :128]), pairs, w, out)),
        (LabTypeError, "x must be fp32", lambda: gf.gemv_float(Rows(rows.x.double()), pairs, w, out)),
        (LabError, "max_rows=3", lambda: gf.gemv_float(rows, pairs._replace(max_rows=3), w, out)),
        (LabError, "out must have shape", lambda: gf.gemv_float(rows, pairs, w, out[:, :4])),
        (LabError, "3 biases for 2 slots", lambda: gf.gemv_float(rows, pairs, w, out, bias=Bias(torch.zeros(3, N)))),
        (LabError, "multiples of 16 bytes", lambda: gf.gemv_float(rows, pairs, _shifted(w), out)),
        (LabError, "two gemv_float", lambda: gf.gemv_float_gated(rows, pairs, w, fc.weight("int8_g64", N, 256), out)),
        (LabError, "limit=-1", lambda: gf.gemv_float_gated(rows, pairs, w, w, out, how=Gate(limit=-1.0))),
    ):
        with pytest.raises(error, match=match):
            call()
    dense = fc.weight("bf16", N, 256)
    with pytest.raises(LabError, match="multiples of 8 values here, got Kd=252"):
        gf.gemv_float(Rows(rows.x[:, :252]), pairs, dense._replace(data=dense.data[..., :252], kd=252), out)


def _shifted(w):
    whole = torch.zeros(w.data.numel() + 8, dtype=torch.uint8)
    return w._replace(data=whole[4 : 4 + w.data.numel()].view(w.data.shape))
