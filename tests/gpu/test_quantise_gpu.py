"""Quantisers on a GPU write the bytes of the CPU, which are ggml's (tests/oracles)."""

import pytest
import torch

from moe_lab.formats import FORMATS, quantize, quantize_steps
from moe_lab.formats.kquants_search import nearest, ordered_sum
from tests.support.weight_cases import KINDS, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none"),
]
NAMES = ("q8_0", "q4_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4", "nvfp4")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_the_cpus(name: str, kind: str) -> None:
    w = weights(kind, 512, 768)
    assert torch.equal(FORMATS[name].quantize(w.cuda()).cpu(), FORMATS[name].quantize(w))


@pytest.mark.parametrize("name", NAMES)
def test_chunks_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = weights("student_t3", 64, 2816).bfloat16().cuda()
    whole = quantize(w, name)
    assert whole.data.is_cuda
    monkeypatch.setitem(quantize_steps.CHUNK, "cuda", 9 * 256)
    assert torch.equal(quantize(w, name).data, whole.data)


def test_nan_of_the_gpu_rounds_to_zero() -> None:
    zero = torch.zeros(1, device="cuda")
    v = torch.cat([zero / zero, torch.full_like(zero, torch.inf) * zero, 1 / zero, -1 / zero])
    assert nearest(v).tolist() == [0, 0, -4194304, -4194304]


def test_sums_are_in_order() -> None:
    terms = torch.randn(32, 3, 4099) * torch.logspace(0, 6, 4099)
    assert torch.equal(ordered_sum(terms.cuda()).cpu(), ordered_sum(terms))
