"""The float GEMV on a GPU: its reference's bits for every format and row count, whatever the tile, and whole layers."""

import pytest
import torch

from moe_lab.bench import float_layer
from moe_lab.bench.workloads import LayerShape
from moe_lab.execution.options import Options
from moe_lab.layer import MoELayer
from moe_lab.tolerances import tol
from moe_lab_kernels.gemv_float import gemv_float as gf
from moe_lab_kernels.gemv_float import tensor, tiles
from moe_lab_kernels.gemv_float.operands import Bias, Pairs, Rows
from moe_lab_kernels.gemv_float.tiles import FloatTile
from moe_lab_kernels.slots.pointer_table import PointerTable
from tests.support import float_cases as fc
from tests.support import float_layers as fl
from tests.support.kernel_cases import Guarded, nmse, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none"),
]
BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 8, 1)  # the last two are a group of nine
TILES = [FloatTile(8, 8, 4), tiles.DOWN_ONE_TALL, tiles.DOWN_MANY_FULL, tiles.GATE_MANY]


def cases() -> list[tuple[str, int]]:
    return [(f, kd) for f in fc.WALKS for kd in fc.WIDTHS if fc.served(f, kd) is None]


@pytest.mark.parametrize(("format", "kd"), cases(), ids=str)
def test_bits_of_the_reference(format: str, kd: int) -> None:
    """Chunks of 1 to 9 rows for each way of decoding; formats that only have other groups meet one and two."""
    w, rows = fc.on(fc.weight(format, 70, kd), "cuda"), fc.rows_of(9, kd, BF16, "cuda")
    every = format in fc.DECODERS
    pairs = fc.pairs_of(SIZES if every else (1, 2), 9, "cuda")._replace(max_rows=8 if every else 2)
    want = fc.product(gf.gemv_float_ref, rows, pairs, w)
    for repeat in range(3):
        got = fc.product(gf.gemv_float, rows, pairs, w)
        assert same_bits(got.view, want.view), repeat
        assert got.intact()


@pytest.mark.parametrize("format", ["bf16", "int4_g32"])
def test_a_row_alone_has_the_bits_it_has_among_eight(format: str) -> None:
    w, rows = fc.on(fc.weight(format, 70, 2880), "cuda"), fc.rows_of(8, 2880, BF16, "cuda")
    together = fc.product(gf.gemv_float, rows, fc.pairs_of((8,), 8, "cuda"), w).view
    table = torch.tensor([[0, p, 1] for p in range(8)], dtype=torch.int32, device="cuda")
    alone = Pairs(fc.pairs_of((8,), 8, "cuda").row_of, table, 1)
    for _ in range(100):
        assert same_bits(fc.product(gf.gemv_float, rows, alone, w).view, together)


@pytest.mark.parametrize("dtype", [F32, F16, E4M3], ids=["f32", "f16", "e4m3"])
@pytest.mark.parametrize("format", ["f32", "f16", "fp8_block", "int4_g64", "int8_g32", "nvfp4_ct", "q4_0"])
def test_every_kind_of_row(format: str, dtype: torch.dtype) -> None:
    w, rows = fc.on(fc.weight(format, 70, 704), "cuda"), fc.rows_of(3, 704, dtype, "cuda")
    pairs = fc.pairs_of((2, 1), 3, "cuda")._replace(max_rows=2)
    made = [fc.product(op, rows, pairs, w, BF16).view for op in (gf.gemv_float, gf.gemv_float_ref)]
    assert same_bits(*made)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("format", ["bf16", "mxfp4_oss"])
def test_no_tile_and_no_early_start_changes_a_bit(format: str, tile: FloatTile) -> None:
    w, rows, pairs = (
        fc.on(fc.weight(format, 70, 2304), "cuda"),
        fc.rows_of(9, 2304, BF16, "cuda"),
        fc.pairs_of(SIZES, 9, "cuda"),
    )
    bias = Bias(torch.randn(2, 70, device="cuda").half())
    want = fc.product(gf.gemv_float_ref, rows, pairs, w, F16, bias=bias).view
    for early in ("", "launch", "weights"):
        assert same_bits(fc.product(gf.gemv_float, rows, pairs, w, F16, bias=bias, tile=tile, early=early).view, want)


@pytest.mark.parametrize("spread", [0, 6], ids=["alike", "wide"])
@pytest.mark.parametrize(("format", "kd"), [(f, kd) for f, kd in cases() if f.startswith("int4")], ids=str)
def test_sixteen_rows_on_the_tensor_cores(format: str, kd: int, spread: int) -> None:
    """The instruction's sums are the reference's, also of values that lie far apart; 1 row, 8 and 13 alike."""
    w, x = fc.on(fc.weight(format, 70, kd), "cuda"), fc.rows_of(13, kd, BF16, "cuda").x
    x = x * torch.exp2(torch.randint(-spread, spread + 1, x.shape, device="cuda").to(BF16))
    row_of = torch.arange(13, dtype=torch.int32, device="cuda")
    want = None
    for op, most in ((tensor.gemv_tensor_ref, 16), (tensor.gemv_tensor, 16), (tensor.gemv_tensor, 8),
                     (tensor.gemv_tensor, 1)):  # fmt: skip
        chunks = [[1, first, min(most, 13 - first)] for first in range(0, 13, most)]
        got = Guarded((13, 70), F32, "cuda")
        op(x, Pairs(row_of, torch.tensor(chunks, dtype=torch.int32, device="cuda"), most), w, got.view)
        assert got.intact()
        assert want is None or same_bits(got.view, want.view), most
        want = got


@pytest.mark.parametrize("tile", [tensor.TensorTile(2, 255), tensor.TensorTile(1, 168)], ids=str)
def test_no_tile_of_the_tensor_cores_changes_a_bit(tile: tensor.TensorTile) -> None:
    w, x = fc.on(fc.weight("int4_g64", 70, 2304), "cuda"), fc.rows_of(9, 2304, BF16, "cuda").x
    w = w._replace(scales=w.scales.bfloat16(), second=w.second.bfloat16())  # loaded by words
    pairs, made = fc.pairs_of(SIZES, 9, "cuda"), []
    for op in (tensor.gemv_tensor_ref, *[tensor.gemv_tensor] * 100):
        out = Guarded((len(pairs.row_of), 70), F16, "cuda")
        op(x, pairs, w, out.view, tile=tile)
        made.append(out.view)
    assert all(same_bits(got, made[0]) for got in made[1:])


@pytest.mark.parametrize("format", ["bf16", "mxfp4_oss", "nvfp4_ct", "int4_g64", "q3_k"])
def test_addresses_give_the_bits_of_an_arena(format: str) -> None:
    w = fc.on(fc.weight(format, 70, 2304, 3), "cuda")
    rows, pairs = fc.rows_of(9, 2304, BF16, "cuda"), fc.pairs_of(SIZES, 9, "cuda", slots=3)
    apart = {}
    for name in ("data", "scales", "second"):
        t = getattr(w, name)
        whole = t is None or t.ndim != 3
        apart[name] = t if whole else PointerTable.of([t[:1].clone(), t.repeat(2, 1, 1)[1::3][:1], t[2:].clone()])
    want = fc.product(gf.gemv_float, rows, pairs, w)
    out = Guarded(tuple(want.view.shape), F32, "cuda")
    gf.gemv_float(rows, pairs, w._replace(**apart), out.view)
    assert same_bits(out.view, want.view)
    assert out.intact()


def test_codes_of_every_byte() -> None:
    """Any byte is a code: the conversions know all of them, NaNs of E4M3 among them."""
    for format in ("fp8_block", "mxfp8", "int8_g32", "int4_g32", "mxfp4_oss", "nvfp4_ct"):
        w = fc.on(fc.weight(format, 64, 1024), "cuda")
        draw = torch.Generator().manual_seed(3)
        w = w._replace(data=torch.randint(256, w.data.shape, generator=draw, dtype=torch.uint8).cuda())
        rows, pairs = fc.rows_of(4, 1024, BF16, "cuda"), fc.pairs_of((1, 2), 4, "cuda")._replace(max_rows=2)
        assert same_bits(*(fc.product(op, rows, pairs, w).view for op in (gf.gemv_float, gf.gemv_float_ref))), format


def test_offsets_past_two_to_the_31() -> None:
    n, kd, last = 8192, 8192, 32  # slot 32 starts at value 2^31
    data = torch.zeros(last + 1, n, kd, dtype=BF16, device="cuda")
    data[last] = torch.randn(n, kd, device="cuda").to(BF16)
    w, x = gf.Weight(data, "bf16", kd), torch.randn(2, kd, device="cuda").to(BF16)
    pairs = Pairs(torch.arange(2, device="cuda").int(), torch.tensor([[last, 0, 2]], device="cuda").int(), 2)
    out = gf.gemv_float(Rows(x), pairs, w, torch.empty(2, n, device="cuda"))
    assert nmse(out, x.float() @ data[last].float().T) <= tol("gemv/float product")


@pytest.mark.parametrize("format", ["bf16", "fp8_block", "mxfp4_oss", "int4_g64", "nvfp4_modelopt"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_the_benchmarks_layer_is_right(format: str, tokens: int) -> None:
    shape = LayerShape("small", 2048, 768, 16, 4)
    w = float_layer.make_layer(shape, format, 1, "cuda", oai=format == "mxfp4_oss")
    far, wrong = float_layer.check(shape, w, tokens, tokens, "cuda")
    assert not wrong
    assert far <= tol("store/bf16")


CASES = [("bf16", f) for f in fl.FORMULAS] + [("mxfp4", "oai-biases"), ("mixed", "plain")]
CASES += [(named, f) for named in ("q2_k+q3_k", "q8_0") for f in fl.OF_ONE_LAUNCH]
FORMATS = {
    "bf16": ("bf16",) * 3, "mxfp4": ("mxfp4",) * 3, "mixed": ("q2_k", "int4_g64", "bf16"),
    "q2_k+q3_k": ("q2_k", "q2_k", "q3_k"), "q8_0": ("q8_0",) * 3,
}  # fmt: skip


def on_gpu(cpu: MoELayer) -> MoELayer:
    stack = cpu.experts.stack  # type: ignore[union-attr]
    biases = None if stack.biases is None else {n: getattr(stack.biases, n).cuda() for n in ("gate", "up", "down")}
    parts = {name: q.to("cuda") for name, q in stack.parts.items()}
    return MoELayer.from_tensors(cpu.spec, router=cpu.router.cuda(), biases=biases, **parts)


@pytest.mark.parametrize(("named", "formula"), CASES)
def test_layers_of_every_formula(named: str, formula: str) -> None:
    layer, x = on_gpu(fl.make(FORMATS[named], formula)), fl.rows(3).cuda()
    routing = layer.route(x)
    got = layer(x, "gemv", routing=routing)
    row = "store/bf16" if named == "bf16" else "gemv/layer"
    assert nmse(got.out, layer(x, "reference", routing=routing).out) <= tol(row)
    assert torch.equal(layer(x, "gemv", routing=routing, options=Options(chunk_rows=1)).out, got.out)
    assert torch.equal(layer(x, "per_token", routing=routing).out, got.out)


KINDS = [(("q2_k", "q2_k", "q3_k"), "bf16"), (("q4_k", "q5_k", "q6_k"), "bf16"), (("fp8_block",) * 3, "fp8")]


@pytest.mark.parametrize(("formats", "kind"), KINDS, ids=str)
def test_layers_on_another_kind_of_activations(formats: tuple[str, str, str], kind: str) -> None:
    layer, x, options = on_gpu(fl.make(formats)), fl.rows(3).cuda(), Options(activation=kind)
    routing = layer.route(x)
    got = layer(x, "gemv", routing=routing, options=options).out
    row = "store/bf16" if kind == "bf16" else "gemv/fp8 rows"
    assert nmse(got, layer(x, "reference", routing=routing).out) <= tol(row)
    assert not torch.equal(layer(x, "gemv", routing=routing).out, got), "the kind made no difference"
    assert torch.equal(layer(x, "per_token", routing=routing, options=options).out, got)
    for more in ({"chunk_rows": 1}, {"routing": "device"}):
        again = layer(x, "gemv", routing=routing, options=Options(activation=kind, **more)).out
        assert torch.equal(again, got), more
