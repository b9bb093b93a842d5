"""Quantised activation rows: what they hold, and ggml's bytes of them."""

import struct

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab.formats import Arithmetic, from_blocks, quantize_activations, quantize_q8_1, to_blocks
from moe_lab_kernels.rows.arithmetic import LAYOUTS
from tests.support.activation_cases import INT8_LAYOUTS, case
from tests.support.kernel_cases import same_bits


def assert_same_rows(a, b) -> None:
    assert (a.layout, a.width) == (b.layout, b.width)
    assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
    assert same_bits(a.scale, b.scale)
    assert (a.total is None) == (b.total is None)
    assert a.total is None or same_bits(a.total, b.total)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_come_back_within_half_a_step(layout: str) -> None:
    x = case("gauss", rows=5, kd=416)
    rows = quantize_activations(x, layout)
    assert (len(rows), rows.width, rows.layout.name) == (5, 416, layout)
    back = rows.dequantize()
    assert back.shape == x.shape
    step = rows.scale.float().abs().repeat_interleave(rows.layout.block, 1)[:, :416]
    # fp8: half of 2^-3 of the value, or half of the smallest step 2^-9; an fp16 scale is off by up to 2^-11 of itself
    bound = torch.maximum(x.abs() / 16, step * 2**-10) if layout == "fp8" else step * (0.5 + 127 * 2**-11)
    assert ((back - x).abs() <= bound * 1.0001).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_taken_together_with_their_scales_and_sums(layout: str) -> None:
    x = case("gauss", rows=6, kd=512)
    rows, pick = quantize_activations(x, layout), torch.tensor([4, 1, 1])
    assert_same_rows(rows[pick], quantize_activations(x[pick], layout))
    assert_same_rows(rows[2:5], quantize_activations(x[2:5], layout))


@pytest.mark.parametrize("layout", INT8_LAYOUTS)
@pytest.mark.parametrize("kd", [256, 2880], ids="K{}".format)
def test_blocks_are_reversible(layout: str, kd: int) -> None:
    rows = quantize_activations(case("gauss", rows=5, kd=kd), layout)
    blocks = to_blocks(rows)
    assert blocks.shape[-1] == {"q8_0": 34, "q8_1": 36, "q8_k": 292}.get(layout, 144)
    assert_same_rows(from_blocks(blocks, layout, width=kd), rows)


def test_fields_lie_where_ggml_has_them() -> None:
    """One row of 256 values: each field by its offset, read with struct."""
    x = case("gauss", rows=2, kd=256)
    for layout in INT8_LAYOUTS:
        rows = quantize_activations(x, layout)
        blocks, second = to_blocks(rows), 128 if layout[0] == "d" else 0
        block = bytes((blocks[1, 1] if second else blocks[1, 0]).numpy())  # of row 1
        head, per = {"q8_0": ("<e", 32), "q8_1": ("<2e", 32), "d4": ("<4f", 128), "ds4": ("<8e", 128),
                     "d2s6": ("<8e", 128), "q8_k": ("<f", 256)}[layout]  # fmt: skip
        size = struct.calcsize(head)
        fields = list(struct.unpack(head, block[:size]))
        codes = list(struct.unpack(f"<{per}b", block[size : size + per]))
        assert codes == rows.codes[1, second : second + per].tolist()
        scale = rows.scale[1].tolist()
        total = [] if rows.total is None else rows.total[1].tolist()
        want = {
            "q8_0": scale[:1],
            "q8_1": [scale[0], *total[:1]],
            "d4": scale[4:8],
            "ds4": [v for pair in zip(scale[4:8], total[4:8], strict=False) for v in pair],
            "d2s6": [*scale[2:4], *total[6:12]],
            "q8_k": scale[:1],
        }[layout]
        assert fields == want, layout
        if layout == "q8_k":
            assert list(struct.unpack("<16h", block[size + per :])) == total


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        (Arithmetic(block=32), "block"),
        (Arithmetic(scale_dtype="fp32"), "scale_dtype"),
        (Arithmetic(safe_sum=True), "sum, sum dtype"),
        (Arithmetic(sum="none"), "sum"),
    ],
    ids=["block", "scale", "safe-sums", "no-sums"],
)
def test_what_a_block_cannot_hold_is_refused(choice: Arithmetic, named: str) -> None:
    with pytest.raises(LabError, match=f"no d2s6 blocks with another {named}"):
        to_blocks(quantize_activations(torch.ones(1, 128), "d2s6", choice))


def test_blocks_with_other_rounding_are_still_blocks() -> None:
    rows = quantize_activations(case("halves", rows=1, kd=128), "d4", Arithmetic(rounding="divide_even"))
    assert same_bits(from_blocks(to_blocks(rows), "d4").codes, rows.codes)


@pytest.mark.wrong_types
def test_other_blocks_are_refused() -> None:
    with pytest.raises(LabError, match=r"ggml has no blocks of layout 'fp8'; it has q8_0"):
        to_blocks(quantize_activations(torch.ones(1, 128), "fp8"))
    with pytest.raises(LabError, match=r"d4 blocks are uint8 \[.., .., 144\], got torch.uint8 of shape \[1, 1, 36\]"):
        from_blocks(torch.zeros(1, 1, 36, dtype=torch.uint8), "d4")
    with pytest.raises(LabError, match="width=200, but 1 d4 blocks a row hold 128 values"):
        from_blocks(torch.zeros(1, 1, 144, dtype=torch.uint8), "d4", width=200)


def test_infinite_sums_are_counted() -> None:
    x = case("constant-3000", rows=2, kd=256)
    assert quantize_q8_1(x).overflowed() == 16
    assert quantize_activations(x, "ds4").overflowed() == 16
    for safe in (("ds4", Arithmetic(safe_sum=True)), ("ds4", Arithmetic(sum_dtype="bf16")), ("d2s6",), ("d4",)):
        assert quantize_activations(x, *safe).overflowed() == 0


def test_bytes_a_row() -> None:
    assert quantize_q8_1(torch.ones(3, 256)).nbytes == 3 * 8 * 36
    assert quantize_activations(torch.ones(3, 256), "d2s6").nbytes == 3 * 2 * 144
