"""The decode arms on the CPU: every format and formula against the reference, and what their activations may be."""

import pytest
import torch

import moe_lab as lab
from moe_lab.arms.gemv_float import float_matmul
from moe_lab.arms.integer import RAW_SUM_OFFSET, integer_matmul
from moe_lab.errors import LabError
from moe_lab.execution.options import Options
from moe_lab.formats import quantize, quantize_activations
from moe_lab.parity import nmse
from moe_lab.tolerances import tol
from moe_lab_kernels.gemv import gemv
from tests.support import float_layers as fl

FLOATS = (
    "f32",
    "f16",
    "bf16",
    "fp8_block",
    "nvfp4_modelopt",
    "nvfp4_ct",
    "mxfp4_oss",
    "mxfp8",
    "int4_g32",
    "int8_g128",
)
BLOCKS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0", "q4_0", "mxfp4", "nvfp4")


def against_reference(formats: tuple[str, str, str], formula: str, arm: str, activation: str | None = None) -> float:
    layer, x = fl.make(formats, formula), fl.rows(5)
    routing = layer.route(x)
    got = layer(x, arm, routing=routing, options=Options(activation=activation))
    return nmse(got.out, layer(x, "reference", routing=routing).out)


@pytest.mark.parametrize("format", FLOATS)
def test_rows_as_they_come_differ_by_store_points_alone(format: str) -> None:
    assert against_reference((format,) * 3, "plain", "gemv") <= tol("store/bf16")


@pytest.mark.parametrize("format", BLOCKS)
def test_blocks_take_rows_as_they_come_where_asked(format: str) -> None:
    close = against_reference((format,) * 3, "plain", "gemv", "bf16")
    assert close <= tol("store/bf16")
    coarse = against_reference((format,) * 3, "plain", "gemv")
    assert close < coarse <= tol("gemv/q4_0 layer" if format == "q4_0" else "gemv/layer")


@pytest.mark.parametrize("formula", fl.FORMULAS)
@pytest.mark.parametrize("formats", [("bf16",) * 3, ("mxfp4",) * 3, ("q2_k", "int4_g64", "bf16")], ids="-".join)
def test_every_formula(formats: tuple[str, str, str], formula: str) -> None:
    row = "store/bf16" if formats[0] == "bf16" else "gemv/layer"
    assert against_reference(formats, formula, "gemv") <= tol(row)


@pytest.mark.parametrize("formula", ["plain", "oai-biases", "weight-on-input"])
def test_per_token_has_the_bits_of_gemv(formula: str) -> None:
    layer, x = fl.make(("int8_g64", "q8_0", "fp8_block"), formula), fl.rows(7)
    routing = layer.route(x)
    a, b = (layer(x, arm, routing=routing).out for arm in ("gemv", "per_token"))
    assert torch.equal(a, b)


def test_e4m3_rows_are_coarser_and_only_for_their_format() -> None:
    exact = against_reference(("fp8_block",) * 3, "plain", "gemv", "bf16")
    assert 10 * exact < against_reference(("fp8_block",) * 3, "plain", "gemv", "fp8") <= tol("gemv/fp8 rows")
    with pytest.raises(LabError, match="bf16 weights meet no fp8 activations, but 'bf16'"):
        against_reference(("bf16",) * 3, "plain", "gemv", "fp8")


@pytest.mark.wrong_types
def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(LabError, match=r"Options.activation is 'int3'"):
        Options(activation="int3")  # type: ignore[arg-type]
    with pytest.raises(LabError, match="there are no 'int3' activations; known: q8_1, bf16, fp8"):
        float_matmul(torch.zeros(1, 32), quantize(torch.ones(1, 32), "bf16"), "int3")


def test_raw_sums_of_q4_0_are_the_kernels() -> None:
    x, q = torch.randn(6, 512, generator=torch.Generator().manual_seed(1)), quantize(torch.randn(40, 512), "q4_0")
    rows, form = quantize_activations(x, "q8_1"), q.integer_form()
    assert form is not None
    want = torch.empty(6, 40)
    table, own = torch.tensor([[0, 0, 6]], dtype=torch.int32), torch.arange(6, dtype=torch.int32)
    gemv.gemv_ref((rows.codes, rows.scale, rows.total), own, q.data[None], table, "q4_0", want)
    raw = integer_matmul(rows, form, RAW_SUM_OFFSET["q4_0"])
    assert nmse(raw, want) <= tol("gemv/emulation")
    assert nmse(integer_matmul(rows, form), want) > 1e6 * tol("gemv/emulation")


def test_float_matmul_is_the_product() -> None:
    x, w = torch.randn(3, 256, generator=torch.Generator().manual_seed(2)), torch.randn(7, 256)
    for format in ("bf16", "q3_k", "nvfp4_ct"):
        q = quantize(w, format)
        assert nmse(float_matmul(x, q), x @ q.dequantize().T) <= tol("gemv/float product")
    with pytest.raises(LabError, match="q3_k weights meet no fp8"):
        float_matmul(x, quantize(w, "q3_k"), "fp8")
    with pytest.raises(LabError, match="takes activation 'bf16' or 'fp8'"):
        float_matmul(x, quantize(w, "q3_k"), "q8_1")


def test_matmul_takes_values_where_asked() -> None:
    x, w = torch.randn(3, 256, generator=torch.Generator().manual_seed(3)), torch.randn(7, 256)
    for format in ("bf16", "q2_k", "mxfp4_oss"):
        q = quantize(w, format)
        assert torch.equal(lab.matmul(x, q, "gemv", "bf16"), float_matmul(x.bfloat16(), q))
    q = quantize(w, "fp8_block")
    assert torch.equal(lab.matmul(x, q, "gemv", "fp8"), float_matmul(x, q, "fp8"))
    with pytest.raises(LabError, match=r"bf16 activations of arm 'gemv' have no choices"):
        lab.matmul(x, q, "gemv", "bf16", lab.Arithmetic(block=64))
