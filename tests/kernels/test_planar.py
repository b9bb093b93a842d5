"""Planar blocks: repacked, decoded and restored without a bit changing."""

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab_kernels.dequantize import dequantize
from moe_lab_kernels.dequantize.planar import Cut, dequantize_planar, dequantize_planar_ref
from moe_lab_kernels.storage import planar
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.planar_layout import ALIGNMENT, PIECES, PLANES, plane_bytes, planes_of
from moe_lab_kernels.storage.unpack import unpack_ref
from tests.kernels.test_dequantize import random_rows
from tests.support.kernel_cases import DTYPES, Guarded, same_bits

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # random scales hold NaN and infinity
]


@pytest.mark.parametrize("shape", [(3, 7, 5), (1, 1), (16, 3), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("format", PIECES)
def test_there_and_back(format: str, shape: tuple[int, ...]) -> None:
    raw = random_rows(format, *shape)
    packed = planar.repack(raw, format)
    assert torch.equal(packed, planar.repack_ref(raw, format))
    n, kd = shape[-2], shape[-1] * BLOCKS[format].values
    assert torch.equal(planar.restore(packed, format, n, kd), raw)
    assert torch.equal(planar.restore_ref(packed, format, n, kd), raw)


@pytest.mark.parametrize("format", ["q3_k", "q4_k", "mxfp4"])
def test_programs_of_several_blocks_meet_where_they_should(format: str) -> None:
    raw = random_rows(format, 2, 59, 5)
    size = planes_of(format, 295)[1]
    buffer = torch.full((4, size), 7, dtype=torch.uint8)
    planar.repack(raw, format, out=buffer[1:3])
    assert torch.equal(buffer[1:3], planar.repack_ref(raw, format))
    assert (buffer[[0, 3]] == 7).all(), "nothing beside the weights is written"


@pytest.mark.parametrize("format", PIECES)
def test_planes_take_the_raw_bytes_and_start_aligned(format: str) -> None:
    assert sum(plane_bytes(format).values()) == BLOCKS[format].bytes
    planes, size = planes_of(format, 48)
    assert size == 48 * BLOCKS[format].bytes, "no padding where the blocks come in sixteens"
    planes, size = planes_of(format, 7)
    assert all(p.start % ALIGNMENT == 0 for p in planes.values())
    assert 0 <= size - 7 * BLOCKS[format].bytes < ALIGNMENT * len(PLANES)


@pytest.mark.parametrize("format", ["q2_k", "q3_k", "q4_k", "q6_k"])
def test_a_word_of_codes_holds_neighbours(format: str) -> None:
    """Value 4 p + b of a word of w-bit fields lies in byte b at bits w p: written out, value by value."""
    raw = random_rows(format, 1, 1)
    codes = planar.repack_ref(raw, format)[: plane_bytes(format)["codes"]].tolist()
    width = {"q2_k": 2, "q3_k": 2, "q4_k": 4, "q6_k": 4}[format]
    offset = {"q2_k": 0, "q3_k": 4, "q4_k": 0, "q6_k": 32}[format]
    want = (unpack_ref(raw, format).codes.flatten().int() + offset) % (1 << width)
    per_word = 32 // width
    for e, value in enumerate(want.tolist()):
        p, b = e % per_word // 4, e % 4
        assert codes[4 * (e // per_word) + b] >> width * p & (1 << width) - 1 == value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", PIECES)
def test_values_are_those_of_the_raw_blocks(format: str, dtype: str) -> None:
    raw, kd = random_rows(format, 3, 7, 5), 5 * BLOCKS[format].values
    packed, want = planar.repack_ref(raw, format), dequantize.dequantize_ref(raw, format, DTYPES[dtype])
    out = Guarded((3, 7, kd), DTYPES[dtype], "cpu")
    dequantize_planar(packed, format, 7, kd, DTYPES[dtype], out=out.view)
    assert same_bits(out.view, want)
    assert out.intact()
    assert same_bits(dequantize_planar_ref(packed, format, 7, kd, DTYPES[dtype]), want)


@pytest.mark.parametrize("blocks", [0, 1, 7, 8, 9, 37], ids="B{}".format)
@pytest.mark.parametrize("format", ["q3_k", "mxfp4"])
def test_any_number_of_blocks_and_programs(format: str, blocks: int) -> None:
    raw, kd = random_rows(format, blocks, 1), BLOCKS[format].values
    out = Guarded((blocks, kd), torch.bfloat16, "cpu")
    dequantize_planar(planar.repack_ref(raw, format), format, blocks, kd, out=out.view, cut=Cut(128, 1))
    assert same_bits(out.view, dequantize.dequantize_ref(raw, format, torch.bfloat16))
    assert out.intact()


def test_padding_is_zero() -> None:
    packed = planar.repack(random_rows("q3_k", 1, 1).fill_(255), "q3_k")
    assert packed.count_nonzero() == 110
    assert len(packed.flatten()) == 64 + 32 + 16 + 16 + 16


@pytest.mark.wrong_types
def test_what_does_not_fit_is_refused_by_name() -> None:
    raw = random_rows("q2_k", 4, 2)
    with pytest.raises(LabError, match="no planar form of 'iq4_nl'; there is one of q4_0"):
        planar.repack(random_rows("iq4_nl", 4, 2), "iq4_nl")
    with pytest.raises(LabError, match=r"\[\.\., N, row_bytes\], got \[168\]"):
        planar.repack(raw[0], "q2_k")
    with pytest.raises(LabError, match=r"whole blocks of 256 values, got a weight of \[4, 300\]"):
        planar.restore(planar.repack(raw, "q2_k"), "q2_k", 4, 300)
    with pytest.raises(LabError, match=r"planar must have shape \[672\], got \[671\]"):
        planar.restore(planar.repack(raw, "q2_k")[:-1], "q2_k", 4, 512)
    with pytest.raises(LabError, match=r"multiples of 16 bytes"):
        dequantize_planar(torch.zeros(680, dtype=torch.uint8)[8:], "q2_k", 4, 512)
