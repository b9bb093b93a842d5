"""Whole layers on the GPU: the arms against each other, streamed against resident, kernels against the CPU's torch
path.
"""

from pathlib import Path

import pytest
import torch

import moe_lab as lab
from moe_lab.activations import Inputs
from moe_lab.arms import ExpertStack
from moe_lab.parity import nmse
from moe_lab.tolerances import tol
from moe_lab_kernels.gemv.gemv import gemv_ref
from moe_lab_kernels.gemv.lane_rows import quantize_lanes_ref
from moe_lab_kernels.rows import combine
from moe_lab_kernels.rows.activation import swiglu_ref
from moe_lab_kernels.rows.quantize_rows import quantize_q8_1_ref
from tests.support import layer_steps as steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
MODEL = Path(__file__).resolve().parents[2] / "data" / "lab-42m.gguf"
LAYER = 3


@pytest.fixture(scope="module")
def ckpt():
    return lab.open(MODEL)


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return Inputs(MODEL, 256, 512).layer(LAYER)


def picks_for_both(ckpt, x: torch.Tensor) -> tuple[lab.Routing, lab.Routing]:
    """The GPU's picks, there and here. The CPU's own differ at near ties alone: sums in float64 instead of fp32."""
    there = ckpt.layer(LAYER, device="cuda").route(x.cuda())
    own = ckpt.layer(LAYER).route(x)
    assert (there.ids.cpu().sort(-1).values == own.ids.sort(-1).values).all(-1).float().mean() > 0.99
    return there, lab.Routing(there.ids.cpu(), there.weights.cpu())


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, "store/bf16"), (torch.float16, "store/bf16")], ids=["bf16", "fp16"]
)
def test_gemv_kernels_agree_with_the_torch_path(ckpt, rows, dtype: torch.dtype, bound: str) -> None:
    x = rows[:199].to(dtype)
    there, here = picks_for_both(ckpt, x)
    on_gpu = ckpt.layer(LAYER, device="cuda")(x.cuda(), "gemv", routing=there)
    assert on_gpu.timing.backend == "cuda"
    assert nmse(on_gpu.out.cpu(), ckpt.layer(LAYER)(x, "gemv", routing=here).out) <= tol(bound)


def stacks(ckpt, which: str) -> tuple[ExpertStack, ExpertStack]:
    there, here = ckpt.layer(LAYER, device="cuda"), ckpt.layer(LAYER)
    return (there.experts.stack, here.experts.stack) if which == "routed" else (there.shared_stack, here.shared_stack)


@pytest.mark.parametrize("which", ["routed", "shared"])
def test_each_step_in_fp32_is_sharp_on_the_same_input(ckpt, rows, which: str) -> None:
    """Bits where both sides add alike (a launcher and its reference, quantisation, the sum over slots); the emulation's
    bound where only the order of fp32 sums differs; the activation's where only exp does."""
    x, (there, here) = rows[:199], stacks(ckpt, which)
    picks, _ = picks_for_both(ckpt, x)
    pairs = steps.pairs_of(ckpt.layer(LAYER), picks if which == "routed" else None, len(x))
    gpu, cpu = steps.by_kernels(there, x.cuda(), pairs), steps.by_torch(here, x, pairs)
    rows_of_x = quantize_lanes_ref(x.cuda(), there.gate.format)
    for part in ("gate", "up"):
        got = getattr(gpu, part)
        assert torch.equal(got, steps.kernel_product(there, part, rows_of_x, pairs.token, pairs, by=gemv_ref)), part
        assert nmse(got.cpu(), getattr(cpu, part)) <= tol("gemv/emulation"), part
    want = swiglu_ref(gpu.gate.cpu(), gpu.up.cpu())
    assert ((gpu.h.cpu() - want).abs() <= tol("activation/f32") * (want.abs() + 1e-30)).all()
    assert nmse(gpu.h.cpu(), cpu.h) <= tol("gemv/emulation"), "two products and exp, before the rounding to codes"
    again = quantize_q8_1_ref(gpu.h.cpu())
    assert all(torch.equal(a.cpu(), b) for a, b in zip(gpu.rows, again[:2], strict=True)), "codes and scales of h"
    lanes, own = steps.lane_rows_of(there, gpu.rows), torch.arange(len(pairs.token))
    assert torch.equal(gpu.down, steps.kernel_product(there, "down", lanes, own, pairs, by=gemv_ref))
    down = steps.torch_product(here, "down", steps.torch_rows(gpu.h, gpu.rows), pairs)
    assert nmse(gpu.down.cpu(), down) <= tol("gemv/emulation")


def test_the_steps_make_the_layer_and_tokens_with_equal_codes_agree_sharply(ckpt, rows) -> None:
    """Whole layers in fp32. On these rows one hidden code of 203,776 falls the other way, because gate and up are added
    in another order: token 155 has 99.98 % of an NMSE of 5e-11, the other tokens together 1e-14."""
    x, layer = rows[:199], ckpt.layer(LAYER, device="cuda")
    there, here = picks_for_both(ckpt, x)
    made, kept = {}, torch.ones(len(x), dtype=torch.bool)
    for which, picks in (("routed", there), ("shared", None)):
        pairs, (on_gpu, on_cpu) = steps.pairs_of(ckpt.layer(LAYER), picks, len(x)), stacks(ckpt, which)
        made[which] = pairs, steps.by_kernels(on_gpu, x.cuda(), pairs)
        kept &= steps.tokens_with_equal_rows(made[which][1], steps.by_torch(on_cpu, x, pairs), pairs, len(x))
    pairs, routed = made["routed"]
    y = torch.zeros(len(x), there.top_k, x.shape[1], device="cuda")
    y[pairs.token.cuda(), pairs.slot.cuda()] = routed.down
    vector = layer.shared.gate_vector
    gate = None if vector is None else torch.sigmoid(x.cuda().double() @ vector.double()).float()
    parts = y, there.weights, made["shared"][1].down, gate
    out = layer(x.cuda(), "gemv", routing=there).out
    assert torch.equal(out, combine.combine(*parts, out_dtype=torch.float32)), "the steps are the layer"
    on_cpu = [None if t is None else t.cpu() for t in parts]
    assert torch.equal(out.cpu(), combine.combine_ref(*on_cpu, out_dtype=torch.float32))
    assert kept.float().mean() > 0.98
    want = ckpt.layer(LAYER)(x, "gemv", routing=here).out
    assert nmse(out.cpu()[kept], want[kept]) <= tol("gemv/emulation")


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 37, 199])
def test_batched_and_per_token_have_the_same_bits(ckpt, rows, tokens: int) -> None:
    layer, x = ckpt.layer(LAYER, device="cuda"), rows[:tokens].cuda().bfloat16()
    assert torch.equal(layer(x, "gemv").out, layer(x, "per_token").out)


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 5, 8])
def test_rows_in_a_chunk_do_not_change_bits(ckpt, rows, chunk_rows: int) -> None:
    layer, x = ckpt.layer(LAYER, device="cuda"), rows.cuda()
    assert torch.equal(layer(x, "gemv", options=lab.Options(chunk_rows=chunk_rows)).out, layer(x, "gemv").out)


@pytest.mark.parametrize("slots", [1, 3, 4, 32])
def test_streamed_has_the_bits_of_resident(ckpt, rows, slots: int) -> None:
    x = rows.cuda()
    with lab.ExpertCache(slots=slots) as cache:
        layer = ckpt.layer(LAYER, device="cuda", cache=cache)
        first, second = layer(x, "gemv"), layer(x, "gemv")
    resident = ckpt.layer(LAYER, device="cuda")(x, "gemv")
    assert torch.equal(first.out, resident.out)
    assert torch.equal(second.out, resident.out)
    assert first.timing.misses == 32
    assert first.timing.bytes_read == 32 * 71168


def test_reference_on_the_gpu_is_the_reference(ckpt, rows) -> None:
    a = ckpt.layer(LAYER, device="cuda")(rows.cuda(), "reference").out.cpu()
    b = ckpt.layer(LAYER)(rows, "reference").out
    assert (a - b).abs().max() <= tol("reference/loop") * b.abs().max()


def test_phases_add_up_and_count_real_launches(ckpt, rows) -> None:
    y = ckpt.layer(LAYER, device="cuda")(rows.cuda(), "gemv")
    row = y.timing.row()
    parts = row["route_ms"] + row["fetch_ms"] + row["compute_ms"] + row["other_ms"]
    assert parts == pytest.approx(row["wall_ms"], rel=1e-6)
    # router, top-k, plan; rows of x quantised and all three projections, for the routed experts and for the shared one;
    # the weighted sum; the shared expert's own gate
    assert row["launches"] == 9


def test_a_decode_step_routes_and_plans_in_one_launch(ckpt, rows) -> None:
    layer = ckpt.layer(LAYER, device="cuda")
    # router, top-k and plan; then as above
    assert layer(rows[:1].cuda(), "gemv").timing.launches == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_picks_do_not_depend_on_the_batch(ckpt, rows, dtype) -> None:
    layer, x = ckpt.layer(LAYER, device="cuda"), rows.cuda().to(dtype)
    whole = layer.route(x)
    for take in (1, 2, 7, 8, 9, 63, 65, 511):
        part = layer.route(x[:take])
        assert torch.equal(part.ids, whole.ids[:take]), take
        assert torch.equal(part.weights, whole.weights[:take]), take
