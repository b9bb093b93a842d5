"""GGUF's block formats: sizes, integer forms, what each bit does, and what is refused."""

import pytest
import torch

from moe_lab.arms.integer import integer_matmul
from moe_lab.errors import LabError
from moe_lab.formats import FORMATS, Planar, QuantTensor, quantize, quantize_q8_1
from moe_lab.parity import nmse
from moe_lab.tolerances import tol
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.planar_layout import PIECES
from moe_lab_kernels.storage.unpack import fields, pack_fields, pack_scales_and_mins, scales_and_mins
from tests.support.kernel_cases import bits
from tests.support.raw_blocks import plain_rows

DECODE_ONLY = ("q4_1", "q5_0", "q5_1", "iq4_nl", "iq4_xs")
INTEGERS = tuple(f for f in BLOCKS if not f.startswith("iq4"))
SIZES = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "q2_k": (256, 84),
    "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210), "iq4_nl": (32, 18),
    "iq4_xs": (256, 136), "mxfp4": (32, 17), "nvfp4": (64, 36),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_q25_block_sizes(name: str) -> None:
    assert (FORMATS[name].block, FORMATS[name].block_bytes) == SIZES[name]
    assert FORMATS[name].row_bytes(4096) == 4096 // SIZES[name][0] * SIZES[name][1]


def test_the_table_of_blocks_is_whole() -> None:
    assert set(BLOCKS) == set(SIZES)
    assert all(SIZES[f][0] % BLOCKS[f].group == 0 for f in SIZES)


@pytest.mark.parametrize("name", BLOCKS)
def test_q22_every_bit_of_a_block_counts(name: str) -> None:
    """Zero blocks hide a scale read with too few bits; here each bit, flipped alone, changes a value."""
    raw = plain_rows(name, 1, 1, seed=1)
    if name == "q2_k":
        raw[:, :16] |= 0x11  # a scale of 0 would hide its codes
    if name in ("mxfp4", "nvfp4"):
        raw[:, BLOCKS[name].bytes % 16 :] |= 0x11  # a code of 0 would hide its sign
    if name == "nvfp4":
        raw[:, :4] = torch.tensor([[0x31, 0x2A, 0x33, 0x1C]], dtype=torch.uint8)
    flipped = raw.repeat(8 * raw.numel(), 1)
    k = torch.arange(8 * raw.numel())
    flipped[k, k // 8] ^= (1 << k % 8).to(torch.uint8)
    changed = (bits(FORMATS[name].dequantize(flipped)) != bits(FORMATS[name].dequantize(raw))).any(-1)
    assert k[~changed].tolist() == ([7, 15, 23, 31] if name == "nvfp4" else []), "the sign of an nvfp4 scale is ignored"


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_form_is_the_dequantised_weight(name: str) -> None:
    raw = plain_rows(name, 7, 512 // BLOCKS[name].values)
    form, want = FORMATS[name].integer_form(raw), FORMATS[name].dequantize(raw).double()
    w = form.codes.double() * form.scale.double().repeat_interleave(form.group, -1)
    if form.mins is not None:
        w -= form.mins.double().repeat_interleave(16, -1) * form.min_scale.double().repeat_interleave(form.group, -1)
    assert torch.equal(form.codes, form.codes.round())
    assert form.codes.abs().max() <= 4096
    # two fp32 roundings a term here and none there
    assert float((w - want).abs().max() / want.abs().max()) <= 2**-22


@pytest.mark.parametrize("name", INTEGERS)
def test_the_int8_arm_multiplies_the_integer_form(name: str) -> None:
    draw = torch.Generator().manual_seed(3)
    rows, raw = quantize_q8_1(torch.randn(9, 512, generator=draw)), plain_rows(name, 60, 512 // BLOCKS[name].values)
    x = rows.codes.double() * rows.scale.double().repeat_interleave(32, -1)
    got = integer_matmul(rows, FORMATS[name].integer_form(raw))
    assert nmse(got, x @ FORMATS[name].dequantize(raw).double().T) <= tol("gemv/emulation")


@pytest.mark.parametrize("name", ["iq4_nl", "iq4_xs"])
def test_tables_have_no_integer_form(name: str) -> None:
    assert FORMATS[name].integer_form(plain_rows(name, 1, 1)) is None


@pytest.mark.parametrize("name", DECODE_ONLY)
def test_what_is_only_decoded_says_so(name: str) -> None:
    with pytest.raises(LabError, match=rf"{name} is only decoded; quantise to one of .*q4_0.*q6_k.*nvfp4"):
        quantize(torch.randn(2, 256), name)


@pytest.mark.parametrize(("width", "run"), [(1, 1), (1, 32), (2, 32), (4, 16), (4, 64), (2, 4)])
def test_fields_pack_and_unpack(width: int, run: int) -> None:
    b = torch.randint(256, (3, 64), dtype=torch.uint8)
    values = fields(b, width, run)
    assert values.shape == (3, 64 * 8 // width)
    for e in (0, 1, run - 1, run, 2 * run - 1, 64 * 8 // width - 1):
        group, within = divmod(e, run * 8 // width)
        byte = int(b[0, group * run + within % run])
        assert values[0, e].item() == byte >> width * (within // run) & (1 << width) - 1
    assert torch.equal(pack_fields(values, width, run), b)


def test_scales_and_mins_pack_and_unpack() -> None:
    b = torch.randint(256, (100, 12), dtype=torch.uint8)
    low, top = scales_and_mins(b)
    assert torch.equal(pack_scales_and_mins(low, top), b)
    s = 5  # of the far half, as the layout's description has it
    assert torch.equal(low[:, s] | top[:, s] << 4, b[:, s + 4] & 15 | b[:, s - 4] >> 6 << 4)
    assert torch.equal(low[:, 8 + s] | top[:, 8 + s] << 4, b[:, s + 4] >> 4 | b[:, s] >> 6 << 4)


@pytest.mark.parametrize("name", PIECES)
def test_planar_tensors_are_the_raw_ones_rearranged(name: str) -> None:
    raw = torch.stack([plain_rows(name, 5, 3, seed=s) for s in range(4)])
    q = QuantTensor.from_bytes(raw, name, (4, 5, 3 * BLOCKS[name].values))
    p = Planar.from_raw(q)
    assert torch.equal(p.to_raw().data, q.data)
    assert torch.equal(p.dequantize(), q.dequantize())
    assert torch.equal(p[2].dequantize(torch.bfloat16), q[2].dequantize().bfloat16())
    assert len(p) == 4
    assert 0 <= p.nbytes - q.nbytes < 4 * 16 * 5
    low_bits = {"q2_k": 2, "q3_k": 2, "q8_0": 8}.get(name, 4)
    assert p.plane("codes").shape == (4, 15, BLOCKS[name].values * low_bits // 8)


def test_planar_refusals_name_what_there_is() -> None:
    p = Planar.from_raw(QuantTensor.from_bytes(plain_rows("q2_k", 5, 3), "q2_k", (5, 768)))
    with pytest.raises(LabError, match="planar q2_k has no plane 'high'; it has codes, scales, floats"):
        p.plane("high")
    with pytest.raises(LabError, match="single matrix"):
        p[0]
