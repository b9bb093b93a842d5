"""Whole layers on the GPU: the arms against each other, streamed against resident, kernels against the CPU's torch
path.
"""

from pathlib import Path

import pytest
import torch

import moe_lab as lab
from moe_lab.activations import Inputs
from moe_lab.parity import nmse
from moe_lab.tolerances import tol

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
MODEL = Path(__file__).resolve().parents[2] / "data" / "lab-42m.gguf"
LAYER = 3


@pytest.fixture(scope="module")
def ckpt():
    return lab.open(MODEL)


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return Inputs(MODEL, 256, 512).layer(LAYER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gemv_kernels_agree_with_the_torch_path(ckpt, rows, dtype) -> None:
    x = rows[:199].to(dtype)
    here = ckpt.layer(LAYER)
    on_gpu = ckpt.layer(LAYER, device="cuda")(x.cuda(), "gemv")
    on_cpu = here(x, "gemv", routing=lab.Routing(on_gpu.routing.ids.cpu(), on_gpu.routing.weights.cpu()))
    assert on_gpu.timing.backend == "cuda"
    # another order of addition in the router's product: sums in fp32 there, in float64 here
    picks = here.route(x)
    assert (on_gpu.routing.ids.cpu().sort(-1).values == picks.ids.sort(-1).values).all(-1).float().mean() > 0.99
    assert nmse(on_gpu.out.cpu(), on_cpu.out) <= tol("gemv/emulation" if dtype == torch.float32 else "store/bf16")


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
    # router, top-k, plan; quantise, gate+up, activation, quantise, down for the routed experts (q2_k, q3_k); quantise,
    # gate+up to hidden rows, down for the shared one (q8_0); the weighted sum
    assert row["launches"] == 12


def test_a_decode_step_routes_and_plans_in_one_launch(ckpt, rows) -> None:
    layer = ckpt.layer(LAYER, device="cuda")
    # router, top-k and plan; then as above
    assert layer(rows[:1].cuda(), "gemv").timing.launches == 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_picks_do_not_depend_on_the_batch(ckpt, rows, dtype) -> None:
    layer, x = ckpt.layer(LAYER, device="cuda"), rows.cuda().to(dtype)
    whole = layer.route(x)
    for take in (1, 2, 7, 8, 9, 63, 65, 511):
        part = layer.route(x[:take])
        assert torch.equal(part.ids, whole.ids[:take]), take
        assert torch.equal(part.weights, whole.weights[:take]), take
