"""Quantisers: any shape and dtype, chunks that do not show, tiny and impossible weights, refusals."""

import numpy as np
import pytest
import torch

from moe_lab.errors import LabError
from moe_lab.formats import FORMATS, NVFP4_FORMAT, quantize, quantize_steps
from moe_lab.formats.kquants_search import nearest, nearest_clamped_, ordered_sum, signed_peak
from moe_lab.formats.quantize_fp4 import fp4_codes, ue4m3_halves
from moe_lab.tolerances import tol
from tests.support.weight_cases import weights

NAMES = ("q8_0", "q4_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4", "nvfp4")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(60, 256), (3, 5, 512), (1, 1, 768), (0, 256), (2, 0, 256)], ids=str)
def test_shape_bytes_and_error(name: str, shape: tuple[int, ...]) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    q, before = quantize(w, name), w.clone()
    assert (q.shape, q.format) == (shape, name)
    assert q.data.shape == (*shape[:-1], FORMATS[name].row_bytes(shape[-1]))
    assert torch.equal(w, before), "the weights are read only"
    if w.numel() > 10_000:
        assert float((q.dequantize() - w).square().mean() / w.square().mean()) < tol(f"quantise/{name}")


@pytest.mark.parametrize("name", NAMES)
def test_chunks_strides_and_dtypes_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = weights("outliers", 12, 768).bfloat16()
    whole = quantize(w.float(), name).data
    assert torch.equal(quantize(w, name).data, whole)
    assert torch.equal(quantize(torch.nn.Parameter(w.float()), name).data, whole)
    assert torch.equal(quantize(w.float().T.contiguous().T, name).data, whole)
    monkeypatch.setitem(quantize_steps.CHUNK, "cpu", 5 * 256)
    assert torch.equal(quantize(w.float(), name).data, whole)
    assert torch.equal(torch.cat([quantize(row[None].float(), name).data for row in w]), whole), "one row at a time"


@pytest.mark.parametrize("name", NAMES)
def test_q01_q02_q29_zero_and_tiny_blocks_stay_finite(name: str) -> None:
    for size in (0.0, 1e-44, 1e-40, 6.3e-38, 1e-30):
        w = torch.zeros(2, 256)
        w[0, 3], w[1, ::7] = size, -size
        values = quantize(w, name).dequantize()
        assert bool(values.isfinite().all()), size
        assert float((values - w).abs().max()) <= float(w.abs().max())
    assert torch.equal(quantize(torch.zeros(2, 256), name).dequantize(), torch.zeros(2, 256))


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_f14_a_row_of_704_is_no_whole_block(name: str) -> None:
    w = torch.randn(256, 704)
    for make in (lambda: quantize(w, name), lambda: FORMATS[name].quantize(w)):
        with pytest.raises(LabError, match=f"{name} rows hold whole blocks of 256 values, but a row has 704"):
            make()
    q = quantize(w, name, fallback="q8_0")
    assert (q.format, q.shape) == ("q8_0", (256, 704))
    assert quantize(w[:, :512], name, fallback="q8_0").format == name, "only where it is needed"
    with pytest.raises(LabError, match="q2_k rows hold whole blocks of 256 values, but a row has 704"):
        quantize(w, name, fallback="q2_k")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinite_weights_are_refused(name: str, bad: float) -> None:
    w = torch.ones(2, 256)
    w[1, 200] = bad
    with pytest.raises(LabError, match=f"cannot quantise to {name}: 1 of 512 weights are NaN or infinite"):
        quantize(w, name)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_weights_that_overflow_half_scales_are_refused(name: str) -> None:
    w = torch.randn(2, 256, generator=torch.Generator().manual_seed(1))
    assert bool(quantize(w * 6e4, name).dequantize().isfinite().all())
    with pytest.raises(LabError, match=rf"cannot quantise to {name}: weights up to .*e\+30 overflow its scales"):
        quantize(w * 1e30, name)


def test_nvfp4_saturates_without_a_tensor_scale() -> None:
    w = torch.zeros(1, 64)
    w[0, 0], w[0, 16], w[0, 32] = 2688.0, 1e5, -1e12
    decoded = NVFP4_FORMAT.dequantize(NVFP4_FORMAT.quantize(w))  # ggml's bytes
    assert decoded[0, [0, 16, 32]].tolist() == [2688.0, 2688.0, -2688.0]
    with pytest.raises(LabError, match=r"nvfp4: weights up to 1e\+12, but its scales hold 2688"):
        quantize(w, "nvfp4")
    assert quantize(w.clamp(-2688, 2688), "nvfp4").dequantize()[0, [0, 16, 32]].tolist() == [2688.0, 2688.0, -2688.0]


def test_fp4_codes_are_the_nearest_values_with_ties_towards_zero() -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    x = torch.arange(-1792, 1793)[None] / 256.0
    nearest_index = (x.abs().unsqueeze(-1) - values).abs().argmin(-1)  # the first of equals: the smaller
    want = nearest_index + 8 * ((x < 0) & (nearest_index > 0))
    assert torch.equal(fp4_codes(x, torch.tensor([0.5])).long(), want)
    scales = ue4m3_halves(torch.arange(127, dtype=torch.uint8))
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(scales * 2, e4m3)


def test_rounding_is_cs_trick_for_any_value() -> None:
    v = np.array([0.5, 1.5, -2.5, 3.0, -0.49999997, 4194303.0, 4194305.0, 1e7, -1e9, 3e38, np.inf, -np.inf], np.float32)
    bits = (v + np.float32(12582912.0)).view(np.int32)
    want = (bits & 0x7FFFFF) - 0x400000
    assert nearest(torch.from_numpy(v)).tolist() == want.tolist()
    assert nearest(torch.tensor([float("nan")])).tolist() == [0]
    tame = torch.tensor([[-3.0, 0.5, 1.5, 99.0]])
    assert nearest_clamped_(tame.clone(), 0, 15, tame[0]).tolist() == [[0.0, 0.0, 2.0, 15.0]]
    wild = torch.tensor([[-3.0, torch.inf, 1.5, torch.nan]])
    assert nearest_clamped_(wild.clone(), 0, 15, wild[0]).tolist() == [[0.0, 0.0, 2.0, 0.0]]


@pytest.mark.parametrize("shape", [(32, 1), (16, 700), (32, 3, 129)], ids=str)
def test_sums_are_in_order(shape: tuple[int, ...]) -> None:
    terms = torch.randn(shape, generator=torch.Generator().manual_seed(4)) * torch.logspace(0, 6, shape[-1])
    want = np.zeros(shape[1:], np.float32)
    for term in terms.numpy():
        want = want + term
    assert ordered_sum(terms).numpy().tobytes() == want.tobytes()


def test_signed_peak_is_the_first_of_equals() -> None:
    x = torch.tensor([[1.0, -3.0, 3.0], [-2.0, 1.0, 2.0], [-0.0, 0.0, -0.0], [-1.0, -1.0, -5.0]])
    want = torch.tensor([-3.0, -2.0, 0.0, -5.0])
    for got in (signed_peak(x, 1), signed_peak(x.T.contiguous(), 0)):
        assert torch.equal(got, want)
        assert not bool(got.signbit()[2])
