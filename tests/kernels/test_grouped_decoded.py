"""Slots decoded once, in waves: the bits of the register path, whatever the wave."""

import pytest
import torch

from moe_lab.arms import grouped as arm
from moe_lab.formats import quantize
from moe_lab.layer import MoELayer
from moe_lab.spec import MoESpec, RouterSpec
from moe_lab_kernels.grouped import decoded
from moe_lab_kernels.grouped.grouped_gemm import grouped_product
from tests.support.grouped_cases import grouped_case, weight
from tests.support.kernel_cases import same_bits
from tests.support.planes import in_planes

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.mark.parametrize(
    ("format", "dtype", "wave"),
    [("q2_k", "f16", 2), ("q8_0", "bf16", 3), ("mxfp4_oss", "bf16", 2), ("int4_g64", "bf16", 3)],
)
def test_waves_have_the_register_paths_bits(format: str, dtype: str, wave: int) -> None:
    case = grouped_case(format, 20, 256, [2, 0, 3, 1, 2], dtype=dtype)
    w = case.gate._replace(data=case.gate.data.contiguous())
    assert decoded.can_decode(w)
    want, out = case.product(), torch.full((case.pairs, 20), float("nan"))
    scratch = torch.empty(decoded.scratch_values(w, wave), dtype=case.x.dtype)
    for first, work in decoded.waves(case.work, 5, wave):
        grouped_product(case.x, case.row_of, decoded.decode_slots(w, first, wave, scratch), work, out)
    assert same_bits(out, want.view)


def test_planes_are_decoded_to_the_same_bits() -> None:
    """Slots that lie apart too; raw blocks that do are not decoded first, planes always."""
    raw = weight("q6_k", 4, 20, 256, 1)._replace(layout="raw")
    lying, room = in_planes(raw), torch.empty(decoded.scratch_values(raw, 3), dtype=torch.bfloat16)
    assert decoded.can_decode(lying)
    assert not lying.data.is_contiguous()
    assert decoded.slots_a_wave([lying], 3 * 2 * 20 * 256) == decoded.slots_a_wave([raw], 3 * 2 * 20 * 256)
    values = decoded.decode_slots(lying, 1, 3, room).data.clone()
    assert same_bits(values, decoded.decode_slots(raw._replace(data=raw.data.contiguous()), 1, 3, room).data)


def test_waves_are_even_and_fit() -> None:
    w = weight("q2_k", 5, 4, 256, 1)
    slot = 2 * 4 * 256
    sizes = {most: decoded.slots_a_wave([w, w], most) for most in (0, 2 * slot, 8 * slot, 9 * slot, 99 * slot)}
    assert sizes == {0: 1, 2 * slot: 1, 8 * slot: 3, 9 * slot: 3, 99 * slot: 5}


def test_only_whole_runs_of_quantised_slots() -> None:
    assert not decoded.can_decode(weight("bf16", 2, 4, 64, 1))
    gaps = weight("q2_k", 4, 4, 256, 1)
    assert not decoded.can_decode(gaps._replace(data=gaps.data[::2]))


def test_rows_from_which_weights_are_decoded_first() -> None:
    """As the costliest of the formats wants it; sooner where rows end inside a step."""
    w = {f: weight(f, 1, 4, 1024, 1) for f in ("q2_k", "q6_k", "mxfp4_oss")}
    assert arm.decode_from([w["q2_k"], w["q2_k"]]) == arm.DECODE_FROM["q2_k"]
    assert arm.decode_from([w["q2_k"], w["q6_k"]]) == arm.DECODE_FROM_ROWS < arm.DECODE_FROM["q2_k"]
    crooked = weight("q2_k", 1, 4, 256, 1)  # rows of 84 bytes
    assert arm.decode_from([w["q2_k"], crooked]) == arm.DECODE_CROOKED_FROM["q2_k"] < arm.DECODE_FROM_ROWS
    uneven = weight("mxfp4_oss", 1, 4, 96, 1)
    assert arm.decode_from([w["mxfp4_oss"], uneven]) == arm.DECODE_UNEVEN_FROM["mxfp4_oss"]
    assert arm.decode_from([w["mxfp4_oss"]] * 3) == arm.DECODE_FROM["mxfp4_oss"]


def test_the_arm_decodes_first_where_experts_have_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(5)
    shapes = {"gate": (4, 64, 256), "up": (4, 64, 256), "down": (4, 256, 64)}
    parts = {name: quantize(torch.randn(*s, generator=g) / 16, "q8_0") for name, s in shapes.items()}
    layer = MoELayer.from_tensors(MoESpec(RouterSpec(4, 2), 256, 64), router=torch.randn(4, 256, generator=g), **parts)
    x, decoded_slots = torch.randn(9, 256, generator=g).bfloat16(), []

    def decode(w: decoded.Weight, first: int, slots: int, scratch: torch.Tensor) -> decoded.Weight:
        decoded_slots.append((first, slots))
        return original(w, first, slots, scratch)

    original = decoded.decode_slots
    monkeypatch.setattr(decoded, "decode_slots", decode)
    want = layer(x, "grouped").out
    assert not decoded_slots
    monkeypatch.setattr(arm, "DECODE_FROM_ROWS", 1)
    monkeypatch.setattr(arm, "DECODED_BYTES", 2 * 2 * 3 * 64 * 256)
    assert same_bits(layer(x, "grouped").out, want)
    assert decoded_slots == [(0, 2)] * 2 + [(2, 2)] * 2 + [(0, 4)]


def test_each_product_goes_by_its_own_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up as they lie, down decoded first, with the bits of either way for both."""
    g = torch.Generator().manual_seed(6)
    q = {"gate": "q2_k", "up": "q2_k", "down": "q3_k"}
    parts = {name: quantize(torch.randn(4, 256, 256, generator=g) / 16, f) for name, f in q.items()}
    layer = MoELayer.from_tensors(MoESpec(RouterSpec(4, 2), 256, 256), router=torch.randn(4, 256, generator=g), **parts)
    x, formats, original = torch.randn(9, 256, generator=g).bfloat16(), [], decoded.decode_slots

    def decode(w: decoded.Weight, *rest) -> decoded.Weight:
        formats.append(w.format)
        return original(w, *rest)

    monkeypatch.setattr(decoded, "decode_slots", decode)
    want = layer(x, "grouped").out
    monkeypatch.setattr(arm, "DECODE_FROM", {"q2_k": 99, "q3_k": 2})
    assert same_bits(layer(x, "grouped").out, want)
    assert formats == ["q3_k"]
