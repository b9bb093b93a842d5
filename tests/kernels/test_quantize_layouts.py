"""Every int8 activation layout and every choice: launcher, reference and a numpy definition give the same bits."""

from dataclasses import replace

import pytest
import torch

from moe_lab.errors import LabError, LabTypeError
from moe_lab_kernels.rows.arithmetic import Arithmetic, layout_of
from moe_lab_kernels.rows.quantize_rows import Tile, quantize_int8, quantize_int8_ref
from tests.support.activation_cases import INT8_LAYOUTS, KINDS, case, emulate
from tests.support.kernel_cases import DTYPES, among_poison, same_bits

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy under the interpreter, on purpose
]
CHOICES = {
    "block32": Arithmetic(block=32),
    "block64": Arithmetic(block=64),
    "block128": Arithmetic(block=128),
    "block256": Arithmetic(block=256),
    "fp32-scale": Arithmetic(scale_dtype="fp32"),
    "bf16-scale": Arithmetic(scale_dtype="bf16"),
    "no-sums": Arithmetic(sum="none"),
    "raw-sums": Arithmetic(sum="raw"),
    "all-raw-fp32": Arithmetic(sum="raw_all", sum_dtype="fp32"),
    "quantised-sums": Arithmetic(sum="quantised"),
    "quantised-bf16": Arithmetic(sum="quantised", sum_dtype="bf16"),
    "safe-sums": Arithmetic(safe_sum=True),
    "divide": Arithmetic(rounding="divide"),
    "divide-even": Arithmetic(rounding="divide_even"),
    "reciprocal": Arithmetic(rounding="reciprocal"),
    "reciprocal-even": Arithmetic(rounding="reciprocal_even"),
    "multiply": Arithmetic(rounding="multiply"),
    "multiply-even": Arithmetic(rounding="multiply_even"),
}


def assert_same(got, want) -> None:
    for name, a, b in zip(("codes", "scale", "total"), got, want, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or same_bits(a, b), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", INT8_LAYOUTS)
def test_bits_of_the_definition(layout: str, kind: str) -> None:
    x = case(kind)
    got = quantize_int8(x, layout)
    assert_same(got, emulate(x, layout_of(layout)))
    assert_same(quantize_int8_ref(x, layout), got)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("layout", INT8_LAYOUTS)
def test_bits_of_the_definition_with_a_choice_changed(layout: str, choice: Arithmetic) -> None:
    x = torch.cat([case(kind, rows=1) for kind in KINDS])
    got = quantize_int8(x, layout, choice)
    assert_same(got, emulate(x, layout_of(layout, choice)))
    assert_same(quantize_int8_ref(x, layout, choice), got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [0, 1, 37], ids="T{}".format)
@pytest.mark.parametrize("layout", ["d4", "ds4", "d2s6", "q8_k"])
def test_rows_of_2880_are_padded_with_zeros(layout: str, t: int, dtype: str) -> None:
    x = case("gauss", rows=t, kd=2880).to(DTYPES[dtype])
    got, made = quantize_int8(x, layout), layout_of(layout)
    padded = 3072 if layout == "q8_k" else 2944
    sums = {"d4": None, "ds4": padded // 32, "d2s6": padded // 128 * 6, "q8_k": padded // 16}[layout]
    assert [None if part is None else tuple(part.shape) for part in got] == [
        (t, padded),
        (t, padded // made.block),
        None if sums is None else (t, sums),
    ]
    assert not got[0][:, 2880:].any()
    if t:
        assert_same(got, emulate(x, made))
        assert_same(quantize_int8_ref(x, layout), got)


@pytest.mark.parametrize("layout", INT8_LAYOUTS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38], ids=str)
def test_what_is_not_finite_stays_in_its_row(bad: float, layout: str) -> None:
    x = case("gauss", rows=3)
    clean = quantize_int8(x, layout)
    x[1, 300] = bad
    got = quantize_int8(x, layout)
    assert_same(got, quantize_int8_ref(x, layout))
    for part, before in zip(got, clean, strict=True):
        assert part is None or same_bits(part[[0, 2]], before[[0, 2]])
    block = 300 // layout_of(layout).block
    scale = got[1][1]
    assert scale[block].isfinite() == (bad == 3e38 and scale.dtype == torch.float32)
    assert scale[torch.arange(len(scale)) != block].isfinite().all()


def test_the_first_of_the_largest_gives_q8_k_its_sign() -> None:
    x = torch.zeros(4, 256)
    x[0, 7], x[0, 9] = 2.0, -2.0
    x[1, 7], x[1, 9] = -2.0, 2.0
    x[2, 255] = 3.0
    codes, scale, _ = quantize_int8(x, "q8_k")
    assert [codes[0, 7], codes[0, 9], codes[1, 7], codes[1, 9], codes[2, 255]] == [-127, 127, -127, 127, -127]
    assert (scale.squeeze(1).sign() == torch.tensor([-1.0, 1.0, -1.0, 0.0])).all()


@pytest.mark.parametrize("even", [False, True], ids=["away", "even"])
def test_halves_of_every_code(even: bool) -> None:
    ties = torch.arange(-126.5, 127)
    x = torch.nn.functional.pad(torch.stack([ties, torch.nextafter(ties, torch.zeros(()))]), (0, 2), value=127.0)
    codes, _, _ = quantize_int8(x, "q8_1", Arithmetic(block=256, rounding="divide_even" if even else "divide"))
    want = ties.round() if even else ties + ties.sign() / 2
    assert torch.equal(codes[0, :254].float(), want)
    assert torch.equal(codes[1, :254].float(), ties - ties.sign() / 2)


@pytest.mark.parametrize("layout", INT8_LAYOUTS)
@pytest.mark.parametrize("tile", [Tile(128, 1), Tile(512, 1), Tile(2048, 4)], ids=lambda t: f"{t.values}x{t.warps}")
def test_a_tile_changes_no_bit(layout: str, tile: Tile) -> None:
    x = case("gauss", rows=3, kd=416)
    assert_same(quantize_int8(x, layout, tile=tile), quantize_int8(x, layout))


@pytest.mark.parametrize("layout", INT8_LAYOUTS)
def test_strides_and_neighbours_do_not_matter(layout: str) -> None:
    x = case("gauss", rows=8).bfloat16()
    for view in (x[:, 32:416], x[:, ::2], x.t().contiguous().t(), among_poison(x, float("nan"))):
        assert_same(quantize_int8(view, layout), quantize_int8(view.contiguous().clone(), layout))


def test_sums_past_fp16_are_infinite_and_safe_sums_are_not() -> None:
    x = case("constant-3000", rows=1, kd=256)
    assert quantize_int8(x, "ds4")[2].isinf().all()
    assert quantize_int8(x, "d2s6")[2].isfinite().all(), "16 * 3000 fits"
    codes, scale, total = quantize_int8(x, "ds4", Arithmetic(safe_sum=True))
    assert total.dtype == torch.int16
    assert torch.equal(total.float() * scale.float(), codes.float().view(1, 8, 32).sum(-1) * scale.float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": 48}, r"block=48.*32, 64, 128, 256"),
        ({"rounding": "up"}, r"rounding='up'.*'divide'"),
        ({"sum": "raw", "safe_sum": True}, r"safe_sum adds codes.*'raw'"),
    ],
    ids=["block", "rounding", "safe-raw"],
)
def test_impossible_choices_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(LabError, match=message):
        Arithmetic(**changes)


def test_other_calls_are_refused() -> None:
    x = torch.zeros(2, 96)
    with pytest.raises(LabError, match=r"no activation layout is called 'q9'; known: q8_0, q8_1"):
        quantize_int8(x, "q9")
    with pytest.raises(LabError, match="quantize_fp8 makes them"):
        quantize_int8(x, "fp8")
    with pytest.raises(LabError, match="e8m0 belongs to fp8"):
        quantize_int8(x, "d4", Arithmetic(scale_dtype="e8m0"))
    with pytest.raises(LabError, match=r"Kd must be a positive multiple of 32, got x of shape \[2, 48\]"):
        quantize_int8(x[:, :48], "d4")
    with pytest.raises(LabTypeError, match=r"fp32 or fp16 or bf16, got torch\.int8"):
        quantize_int8(x.to(torch.int8), "d4")
    with pytest.raises(LabError, match=r"8388608 rows of 4096 values pass 34359738368; quantise them in parts"):
        quantize_int8(torch.zeros(1, 4096).expand(1 << 23, 4096), "d4")


def test_choices_replace_the_layouts_own() -> None:
    own = layout_of("d2s6")
    assert layout_of("d2s6", Arithmetic(block=32)) == replace(own, block=32)
    assert layout_of("d2s6", Arithmetic(safe_sum=True)) == replace(own, safe_sum=True, sum="quantised", sums_kept=8)
    assert layout_of("q8_k", Arithmetic(sum="raw_all")).safe_sum is False
    assert layout_of("q8_1", Arithmetic(block=256)).unit == 256
