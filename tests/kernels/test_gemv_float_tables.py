"""Slots by address in the float GEMV: bits of an arena for every format, refusals, and the shared expert fused."""

from dataclasses import replace

import pytest
import torch

import moe_lab as lab
from moe_lab.arms.fused import FusedStack, cannot_fuse
from moe_lab.arms.stack import ExpertStack
from moe_lab.errors import LabError
from moe_lab.workspace import poisoned
from moe_lab_kernels.gemv_float import gemv_float as gf
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.slots.pointer_table import PointerTable
from tests.support import float_cases as fc
from tests.support.decode_layers import decode_layer, decode_rows
from tests.support.kernel_cases import Guarded, same_bits

pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
SLOTS, N, KD = 4, 6, 256


def tables(w: Weight) -> Weight:
    """The slots in three allocations, one of them strided."""

    def spread(t: torch.Tensor | None) -> torch.Tensor | PointerTable | None:
        if t is None or t.ndim != 3:
            return t
        return PointerTable.of([t[:1].clone(), t.repeat(2, 1, 1)[1::SLOTS][:1], t[2:].clone()])

    return w._replace(**{name: spread(getattr(w, name)) for name in ("data", "scales", "second")})


@pytest.mark.parametrize("format", ["bf16", "fp8_block", "nvfp4_ct", "int4_g32", "q3_k"])
def test_addresses_give_the_bits_of_an_arena(format: str) -> None:
    """Chunks of every slot, of slots that are not there, and of none."""
    w, rows, pairs = fc.weight(format, N, KD, SLOTS), fc.rows_of(3, KD, torch.bfloat16), fc.pairs_of((1, 2, 1, 1), 3)
    pairs.chunks[3:, 0] = torch.arange(SLOTS)
    want = fc.product(gf.gemv_float, rows, pairs, w)
    for op in (gf.gemv_float, gf.gemv_float_ref):
        out = Guarded(tuple(want.view.shape), torch.float32, "cpu")
        op(rows, pairs, tables(w), out.view)
        assert same_bits(out.view, want.view)
        assert out.intact()
    if format not in ("bf16", "int4_g32"):
        return
    gate = fc.weight(format, N, KD, SLOTS, seed=1)
    made = [fc.hidden(gf.gemv_float_gated, rows, pairs, gate, w, torch.bfloat16)]
    made.append(Guarded(tuple(want.view.shape), torch.bfloat16, "cpu"))
    gf.gemv_float_gated(rows, pairs, tables(gate), tables(w), made[1].view)
    assert same_bits(made[0].view, made[1].view)


def test_what_is_no_table_of_these_slots_is_refused() -> None:
    w, rows, pairs = fc.weight("int4_g64", N, KD, SLOTS), fc.rows_of(3, KD, torch.bfloat16), fc.pairs_of((3,), 3)
    out, there = torch.empty(3, N), tables(w)
    half = w._replace(scales=there.scales)
    odd = torch.zeros(SLOTS * N * 128 + 8, dtype=torch.uint8)[8:].view(SLOTS, N, 128)
    by_eight = there._replace(data=PointerTable.of([odd]))
    dense = tables(fc.weight("bf16", N, KD, SLOTS))
    for bad, words in (
        (half, "of w and its scales one is a tensor, one a table of addresses"),
        (by_eight, "multiples of 16 bytes, of these only of 8"),
        (there._replace(kd=128), "w must have shape"),
    ):
        with pytest.raises(LabError, match=words):
            gf.gemv_float(rows, pairs, bad, out)
    with pytest.raises(LabError, match="two gemv_float"):
        gf.gemv_float_gated(rows, pairs, dense, tables(fc.weight("f16", N, KD, SLOTS)), out)
    with pytest.raises(LabError, match=r"source 1 is torch.float16 \[4, 6, 256\]; wanted bfloat16 \[S, 6, 256\]"):
        PointerTable.of([dense.data[0][None], fc.weight("f16", N, KD, SLOTS).data])


FUSED = {"fused": lab.Options(shared="fused"), "device": lab.Options(routing="device", shared="fused")}


@pytest.mark.parametrize("format", ["bf16", "nvfp4_ct", "int4_g64"])
def test_one_launch_serves_the_shared_expert_too(format: str) -> None:
    layer, x = decode_layer((format,) * 3, experts=3, top_k=1), decode_rows(2)
    want = layer(x, "gemv")
    for how in FUSED.values():
        with poisoned():
            got = layer(x, "gemv", options=how)
        assert torch.equal(got.out, want.out)
        assert got.timing.launches < want.timing.launches


@pytest.mark.parametrize("activation", ["bf16", "fp8"])
def test_so_it_does_with_other_activations(activation: str) -> None:
    formats = ("fp8_block",) * 3 if activation == "fp8" else ("q2_k", "q2_k", "q3_k")
    layer, x = decode_layer(formats, experts=3, top_k=1), decode_rows(2)
    want = layer(x, "gemv", options=lab.Options(activation=activation)).out
    assert torch.equal(layer(x, "gemv", options=lab.Options(activation=activation, shared="fused")).out, want)


def test_experts_laid_out_in_different_ways_are_not_one_launch() -> None:
    layer = decode_layer(("int4_g64",) * 3, experts=3, top_k=1)
    routed, shared = layer.experts.stack, layer.shared_stack
    assert shared is not None
    assert cannot_fuse(layer.spec, routed, shared) is None
    assert shared.up.scales is not None
    other = ExpertStack(shared.gate, replace(shared.up, scales=shared.up.scales.bfloat16()), shared.down, {0: 0})
    why = cannot_fuse(layer.spec, routed, other)
    assert why is not None
    assert "routed experts' up has scales (torch.float32, [256, 4]" in why
    scales = FusedStack(routed, shared).by_address("up").scales
    assert scales is not None
    assert len(scales) == 4
