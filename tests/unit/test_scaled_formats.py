"""Weights with separate scales: their parts, their values, their limits, and what is refused."""

import math

import pytest
import torch

from moe_lab.errors import LabError, LabTypeError
from moe_lab.formats import FORMATS, QuantTensor, ScaledFormat, get_format, quantize, split_gate_up
from moe_lab.formats.transposed import Resident, TransposedTensor
from moe_lab_kernels.storage.minifloat import e2m1_codes, e4m3_codes, e4m3_values, e8m0_values
from tests.support.scaled_cases import PACKED, SCALED, heavy_tailed, quantised

NAN, INF = math.nan, math.inf
# format: bits a weight, largest share of the variance that quantising heavy-tailed rows may cost
FORMAT_FACTS = {
    "fp8_block": (8 + 32 / 128**2, 1e-3), "mxfp8": (8.25, 1.5e-3), "mxfp4_oss": (4.25, 0.02),
    "nvfp4_modelopt": (4.5, 0.012), "nvfp4_ct": (4.5, 0.012),
    "int4_g32": (5.0, 0.012), "int4_g64": (4.5, 0.018), "int4_g128": (4.25, 0.025),
    "int8_g32": (9.0, 4e-5), "int8_g64": (8.5, 6e-5), "int8_g128": (8.25, 8e-5),
}  # fmt: skip
ONE = {"fp8_block": 0x38, "mxfp8": 0x38, "nvfp4_modelopt": 0x22, "nvfp4_ct": 0x22, "mxfp4_oss": 0x22}


def ones(format: str, shape: tuple[int, ...], scales: torch.Tensor, global_scale: torch.Tensor | None = None):
    """Every code 1.0 under the given scales."""
    rows = FORMATS[format].row_bytes(shape[-1])
    data = torch.full((*shape[:-1], rows), ONE[format], dtype=torch.uint8)
    return QuantTensor.from_parts(data, scales, global_scale, format, shape)


@pytest.mark.parametrize("format", SCALED)
def test_quantising_keeps_shape_error_and_size(format: str) -> None:
    w = heavy_tailed((3, 256, 512), seed=2).bfloat16()
    q = quantize(w, format)
    assert q.shape == w.shape
    assert isinstance(q.codec, ScaledFormat)
    error = (q.dequantize() - w.float()).square().mean() / w.float().square().mean()
    bits, largest_error = FORMAT_FACTS[format]
    assert error < largest_error, f"bits decide the error: {bits:.3f} a weight"
    assert q.codec.bits_per_weight == bits
    assert 8 * q.nbytes / w.numel() == q.codec.bits_of(tuple(w.shape))
    assert q.first_flaw() is None


@pytest.mark.parametrize("format", SCALED)
def test_everything_is_sliced_and_moved_together(format: str) -> None:
    q = quantised(format, (3, 128, 256))
    assert torch.equal(q[2].dequantize(), q.dequantize()[2])
    assert torch.equal(q.to("cpu").dequantize(), q.dequantize())
    assert torch.equal(q[1].stacked().dequantize(), q.dequantize()[1:2])
    assert torch.equal(q[0].stacked()[0].dequantize(), q[0].dequantize())
    assert sum(part.nbytes for part in (q[0], q[1], q[2])) == q.nbytes
    assert torch.equal(QuantTensor.stack([q[0], q[1], q[2]]).dequantize(), q.dequantize())
    again = QuantTensor.from_parts(q.data, q.scales, q.global_scale, format, q.shape, biases=q.biases)
    assert torch.equal(again.dequantize(), q.dequantize())


@pytest.mark.parametrize("format", [f for f in SCALED if f != "fp8_block"])
def test_rows_of_a_fused_tensor(format: str) -> None:
    q = quantised(format, (2, 12, 256))
    assert torch.equal(q.rows(slice(6, None)).dequantize(), q.dequantize()[:, 6:])
    assert torch.equal(q.rows(slice(1, None, 2)).dequantize(), q.dequantize()[:, 1::2])


def test_rows_that_share_a_scale_stay_together() -> None:
    q = quantised("fp8_block", (256, 128))
    assert torch.equal(q.rows(slice(128, 256)).dequantize(), q.dequantize()[128:])
    for part in (slice(0, 100), slice(64, 192), slice(0, None, 2)):
        with pytest.raises(LabError, match="128 rows"):
            q.rows(part)


# Values (faults Q01, Q02, Q04, Q05, Q07, Q08, Q11, Q13, Q14, Q16, Q17)


def test_q07_short_last_blocks_have_scales_of_their_own() -> None:
    w = ones("fp8_block", (192, 256), torch.tensor([[1.0, 2.0], [4.0, 8.0]])).dequantize()
    assert [w[0, 0], w[0, 128], w[127, 255], w[128, 0], w[191, 255]] == [1, 2, 2, 4, 8]
    with pytest.raises(LabError, match=r"\[2, 2\].*\[1, 2\]"):
        ones("fp8_block", (192, 256), torch.ones(1, 2))


def test_q08_halves_of_a_fused_table_own_their_rows_of_scales() -> None:
    data = torch.full((384, 128), 0x38, dtype=torch.uint8)
    four = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    gate, up = split_gate_up("fp8_block", (384, 128), data, four)
    assert (gate.dequantize()[127, 0], gate.dequantize()[128, 0]) == (1, 2)
    assert torch.equal(up.dequantize()[:, 0], torch.tensor([4.0] * 128 + [8.0] * 64))
    with pytest.raises(LabError, match=r"4 in a fused table.*\[3, 1\]"):
        split_gate_up("fp8_block", (384, 128), data, torch.ones(3, 1))
    with pytest.raises(LabError, match="even number of rows"):
        split_gate_up("fp8_block", (383, 128), data[:383], four)


@pytest.mark.parametrize("format", ["mxfp8", "int4_g32"])
def test_halves_of_a_fused_table_whose_rows_have_scales_of_their_own(format: str) -> None:
    q = quantised(format, (2, 12, 64))
    gate, up = split_gate_up(format, q.shape, q.data, q.scales, biases=q.biases)
    assert torch.equal(torch.cat([gate.dequantize(), up.dequantize()], 1), q.dequantize())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4_oss"])
def test_q11_q13_q14_exponents_are_exponents(format: str, dtype: torch.dtype) -> None:
    bytes_ = torch.tensor([[126], [127], [134], [160], [254], [255], [0]], dtype=torch.uint8).view(dtype)
    w = ones(format, (7, 32), bytes_).dequantize()[:, 5].tolist()
    assert w[:5] == [0.5, 1.0, 128.0, 8589934592.0, 2.0**127]
    assert math.isnan(w[5])
    assert w[6] == 2.0**-127


def test_q16_one_maker_multiplies_the_other_divides() -> None:
    data = torch.tensor([[0x42, 0x21] + [0x42] * 14], dtype=torch.uint8)
    scales = torch.tensor([[0.5, 0.25]]).to(torch.float8_e4m3fn)
    times = QuantTensor.from_parts(data, scales, torch.tensor(0.5), "nvfp4_modelopt", (1, 32)).dequantize()
    over = QuantTensor.from_parts(data, scales, torch.tensor([2.0]), "nvfp4_ct", (1, 32)).dequantize()
    assert torch.equal(times, over)
    assert times[0, [0, 1, 2, 3, 16]].tolist() == [0.25, 0.5, 0.125, 0.25, 0.125]


def test_q17_gate_and_up_keep_their_own_global_scales() -> None:
    scales, codes = (torch.full((2, 8, n), byte, dtype=torch.uint8) for n, byte in ((1, 0x38), (8, 0x22)))
    pairs = torch.tensor([[1.0, 0.5], [2.0, 4.0]])
    gate, up = split_gate_up("nvfp4_modelopt", (2, 8, 16), codes, scales, pairs)
    assert [half.dequantize()[e].unique().tolist() for e in (0, 1) for half in (gate, up)] == [
        [1.0],
        [0.5],
        [2.0],
        [4.0],
    ]
    with pytest.raises(LabError, match=r"one a matrix \[2\].*\[2, 2\]"):
        QuantTensor.from_parts(codes, scales, pairs, "nvfp4_modelopt", (2, 8, 16))


def test_q05_another_reading_of_the_same_bytes_is_refused_by_name() -> None:
    codes = torch.tensor([[0x80, 0x38, 0x7F]], dtype=torch.uint8)
    read = QuantTensor.from_parts(codes, torch.ones(1, 1), None, "fp8_block", (1, 3)).dequantize()
    assert read[0, :2].tolist() == [-0.0, 1.0]
    assert read[0, 2].isnan()
    with pytest.raises(LabTypeError, match="float8_e4m3fnuz"):
        QuantTensor.from_parts(codes.view(torch.float8_e4m3fnuz), torch.ones(1, 1), None, "fp8_block", (1, 3))


@pytest.mark.parametrize("format", SCALED)
def test_q01_zeros_stay_zeros(format: str) -> None:
    w = torch.zeros(256, 256)
    w[0, 0] = 1
    q = quantize(w, format)
    assert torch.equal(q.dequantize(), w)
    assert q.first_flaw() is None
    assert torch.equal(quantize(torch.zeros(2, 128, 128), format).dequantize(), torch.zeros(2, 128, 128))


def test_q01_a_scale_of_zero_is_a_dead_block() -> None:
    q = ones("fp8_block", (1, 256), torch.tensor([[1.0, 0.0]]))
    assert q.dequantize()[0, [0, 128]].tolist() == [1.0, 0.0]
    assert q.first_flaw() is None


@pytest.mark.parametrize("amax", [6.3e-38, 1e-44], ids=str)
@pytest.mark.parametrize("format", SCALED)
def test_q02_tiny_values_do_not_overflow_their_inverse(format: str, amax: float) -> None:
    w = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).clamp(-1, 1) * amax
    q = quantize(w, format)
    assert q.first_flaw() is None
    assert float((q.dequantize() - w).abs().max()) <= amax


def test_q04_e4m3_clamps_before_the_cast() -> None:
    codes = e4m3_codes(torch.tensor([448.0, 464.0, 465.0, 1000.0, -1000.0, INF, NAN, -NAN]))
    assert e4m3_values(codes)[:6].tolist() == [448, 448, 448, 448, -448, 448]
    assert codes[6:].tolist() == [0x7F, 0x7F]


@pytest.mark.parametrize("format", ["fp8_block", "mxfp8"])
def test_c6_a_nan_stays_where_it_is(format: str) -> None:
    w = torch.ones(2, 128)
    w[1, 3] = NAN
    q = QuantTensor.encode(w, get_format(format))
    assert q.dequantize().isnan().nonzero().tolist() == [[1, 3]]
    assert torch.equal(q.dequantize()[0], w[0])


def test_e2m1_rounds_to_nearest_and_ties_to_even_codes() -> None:
    x = torch.tensor([0.25, 0.26, 0.75, 1.25, 1.26, 1.75, 2.5, 2.51, 3.5, 5.0, 5.1, 1e9, INF, NAN, -0.75, -7.0])
    assert e2m1_codes(x).tolist() == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 7, 7, 0, 10, 15]


def test_e4m3_codes_are_the_nearest() -> None:
    table = e4m3_values(torch.arange(127, dtype=torch.uint8)).double()
    x = torch.rand(4096, generator=torch.Generator().manual_seed(1)) * 448
    picked = e4m3_values(e4m3_codes(x)).double()
    nearest = (table - x.double()[:, None]).abs().amin(1)
    assert torch.equal((picked - x.double()).abs(), nearest)


def test_q19_a_global_scale_is_divided_out_again() -> None:
    x, eye = quantize(torch.ones(1, 16), "nvfp4_ct"), quantize(torch.eye(16), "nvfp4_ct")
    assert x.global_scale is not None
    assert float(x.global_scale) == 2688
    assert torch.equal(x.dequantize() @ eye.dequantize().T, torch.ones(1, 16))


@pytest.mark.parametrize("format", ["nvfp4_ct", "nvfp4_modelopt"])
def test_q20_the_global_scale_carries_large_blocks(format: str) -> None:
    w = torch.ones(4, 64)
    w[1, 16:32] = 5000
    assert float((quantize(w, format).dequantize()[1, 16:32] - 5000).abs().max()) < 500


# Refusals and flaws


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: ones("mxfp8", (2, 48), torch.zeros(2, 1, dtype=torch.uint8)), LabError, ("mxfp8", "32", "48")),
        (lambda: ones("mxfp8", (2, 64), torch.ones(2, 2)), LabTypeError, ("mxfp8", "uint8", "float32")),
        (lambda: ones("fp8_block", (2, 64), torch.ones(1, 1, dtype=torch.int32)), LabTypeError, ("float32", "int32")),
        (lambda: QuantTensor.from_parts(torch.zeros(9, dtype=torch.uint8), torch.ones(1, 1), None, "fp8_block", (2, 5)),
         LabError, ("10 bytes", "got 9")),
        (lambda: QuantTensor.from_parts(torch.zeros(2, 8, dtype=torch.uint8), None, None, "fp8_block", (2, 8)),
         LabError, ("fp8_block", "needs scales")),
        (lambda: ones("nvfp4_ct", (2, 16), torch.zeros(2, 1, dtype=torch.uint8)), LabError, ("needs global_scale",)),
        (lambda: ones("fp8_block", (2, 16), torch.ones(1, 1), torch.tensor(1.0)), LabError, ("has no global_scale",)),
        (lambda: ones("nvfp4_ct", (2, 16), torch.zeros(2, 1, dtype=torch.uint8), torch.ones(3)), LabError, ("[3]",)),
        (lambda: QuantTensor.from_bytes(torch.zeros(8, dtype=torch.uint8), "mxfp8", (8,)), LabError, ("from_parts",)),
        (lambda: QuantTensor.from_parts(torch.zeros(1, 34, dtype=torch.uint8), torch.ones(1), None, "q8_0", (1, 32)),
         LabError, ("q8_0", "hold their scales")),
        (lambda: QuantTensor(torch.zeros(1, 32, dtype=torch.uint8), "mxfp8", (1, 32), FORMATS["mxfp8"]),
         LabError, ("mxfp8", "without scales", "cache")),
        (lambda: QuantTensor.stack([quantised("mxfp8", (2, 32)), quantised("mxfp8", (3, 32))]),
         LabError, ("mxfp8 [2, 32], mxfp8 [3, 32]",)),
        (lambda: FORMATS["mxfp8"].dequantize(torch.zeros(32, dtype=torch.uint8)), LabError, ("mxfp8", "scales")),
        (lambda: quantize(torch.zeros(32), "mxfp8"), LabError, ("matrices", "(32,)")),
        (lambda: quantize(torch.full((2, 32), NAN), "mxfp8"), LabError, ("mxfp8", "64 of 64")),
        (lambda: TransposedTensor.of(quantised("mxfp8", (2, 32))), LabError, ("mxfp8", "nvfp4_ct")),
        (lambda: Resident.of(quantised("mxfp4_oss", (2, 32)), ["sideways"]), LabError, ("sideways", "transposed")),
    ],
    ids=["row_not_whole_groups", "scale_dtype", "integer_scales", "too_few_codes", "no_scales", "no_global_scale",
         "global_scale_too_many", "global_scale_shape", "bytes_without_scales", "block_format_with_scales",
         "tensor_without_scales", "unlike_stack", "codes_alone", "vector", "nan_weights", "no_transposed_layout",
         "no_such_layout"],
)  # fmt: skip
def test_refusals_name_the_numbers(make, error: type, words: tuple[str, ...]) -> None:
    with pytest.raises(error) as e:
        make()
    for word in words:
        assert word in str(e.value)


@pytest.mark.parametrize(
    ("q", "part", "index", "block"),
    [
        (lambda: ones("fp8_block", (2, 256, 256), torch.tensor([[[1.0, 1], [1, 1]], [[1, NAN], [1, 1]]])),
         "scales", (1, 0, 1), 5),
        (lambda: ones("fp8_block", (128, 256), torch.tensor([[1.0, -2.0]])), "scales", (0, 1), 1),
        (lambda: ones("fp8_block", (128, 256), torch.tensor([[INF, 1.0]])), "scales", (0, 0), 0),
        (lambda: ones("mxfp4_oss", (2, 64), torch.tensor([[1, 2], [255, 4]], dtype=torch.uint8)), "scales", (1, 0), 2),
        (lambda: ones("nvfp4_ct", (1, 32), torch.tensor([[0x38, 0x7F]], dtype=torch.uint8), torch.tensor(1.0)),
         "scales", (0, 1), 1),
        (lambda: ones("nvfp4_ct", (1, 16), torch.tensor([[0x38]], dtype=torch.uint8), torch.tensor(0.0)),
         "global_scale", (), 0),
        (lambda: QuantTensor.from_parts(torch.tensor([[0] * 40 + [0xFF] + [0] * 23], dtype=torch.uint8),
                                        torch.tensor([[127, 127]], dtype=torch.uint8), None, "mxfp8", (1, 64)),
         "data", (0, 40), 1),
        (lambda: QuantTensor.from_bytes(torch.tensor([[0x00, 0x7C] + [1] * 32], dtype=torch.uint8), "q8_0", (1, 32)),
         "data", (0, 0), 0),
    ],
    ids=["fp8_nan", "fp8_negative", "fp8_infinite", "mxfp4_255", "nvfp4_nan", "nvfp4_global_zero", "mxfp8_code",
         "q8_0_infinite"],
)  # fmt: skip
def test_the_finite_check_names_the_place(q, part: str, index: tuple[int, ...], block: int) -> None:
    tensor = q()
    flaw = tensor.first_flaw()
    assert flaw is not None
    assert (flaw.part, flaw.index, flaw.block) == (part, index, block)
    with pytest.raises(LabError) as e:
        tensor.expect_finite("blk.0.w")
    for word in ("blk.0.w", part, str(list(index)), f"block {block}"):
        assert word in str(e.value)


def test_mxfp4_oss_blocks_come_as_they_stand_in_files() -> None:
    q = quantised("mxfp4_oss", (2, 6, 64))
    blocks = q.data.view(2, 6, 2, 16)
    assert torch.equal(QuantTensor.from_parts(blocks, q.scales, None, "mxfp4_oss", (2, 6, 64)).data, q.data)


def test_affine_words_hold_the_first_element_in_the_lowest_bits() -> None:
    words = torch.tensor([[0x76543210, 0x0FEDCBA8]], dtype=torch.int64).to(torch.int32).repeat(1, 4)
    biases = torch.zeros(1, 1)
    for dtype in (torch.int32, torch.uint32):
        q = QuantTensor.from_parts(words.view(dtype), torch.ones(1, 1), None, "int4_g64", (1, 64), biases=biases)
        assert q.dequantize()[0, :8].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
        assert q.dequantize()[0, 8:16].tolist() == [8, 10, 11, 12, 13, 14, 15, 0]


@pytest.mark.parametrize("format", PACKED)
def test_both_layouts_resident_cost_both(format: str) -> None:
    q = quantised(format, (2, 48, 64))
    for layouts, times in ((["plain"], 1), (["transposed"], 1), (["plain", "transposed"], 2)):
        held = Resident.of(q, layouts)
        assert held.nbytes == times * q.nbytes
        assert list(held.nbytes_by_layout) == layouts
    turned = TransposedTensor.of(q)
    assert torch.equal(turned.dequantize(), q.dequantize())
    assert torch.equal(turned.columns(torch.bfloat16), q.dequantize().bfloat16().mT)
    back = turned.plain()
    assert all(torch.equal(back.tensors[name], t) for name, t in q.tensors.items())


def test_e8m0_scales_of_fp8_blocks_become_their_powers() -> None:
    q = ones("fp8_block", (1, 256), torch.tensor([[128, 126]], dtype=torch.uint8).view(torch.float8_e8m0fnu))
    assert q.dequantize()[0, [0, 200]].tolist() == e8m0_values(torch.tensor([128, 126], dtype=torch.uint8)).tolist()
