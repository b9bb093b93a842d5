"""Rows of the fault table about groups of rows, as layers on any device. Where the others are tested: G05, G14, G22 and
G23 in `faults/test_layer_formulas`; G07 and G08 in `kernels/test_grouped_gemm` and `test_gemv_bounds`; G10, G11 and G16
in `gpu/test_grouped_gpu`, `test_gemv_float_gpu`, `test_kernels_gpu`; G13 and G19 in `test_many_tokens` and
`test_fresh_processes`.
"""

import torch

from moe_lab.formats import quantize
from moe_lab.layer import MoELayer
from moe_lab.parity import nmse
from moe_lab.routing import Routing
from moe_lab.spec import MoESpec, RouterSpec
from moe_lab.tolerances import tol

ARMS = [("gemv", "bf16"), ("grouped", "bf16"), ("gemv", "q8_0"), ("grouped", "q8_0"), ("mmq", "q8_0")]
BATCHES = (1, 2, 17, 64, 513)


def layer(experts: int, top_k: int, d: int, f: int, format: str, device: str) -> MoELayer:
    """Gaussian experts, quantised for real."""
    draw = torch.Generator().manual_seed(experts + d)

    def stack(n: int, kd: int):
        w = torch.randn(experts, n, kd, generator=draw) * kd**-0.5
        return w.bfloat16().to(device) if format == "bf16" else quantize(w, format).to(device)

    router = torch.randn(experts, d, generator=draw).to(device)
    spec = MoESpec(RouterSpec(experts, top_k), d, f)
    return MoELayer.from_tensors(spec, router=router, gate=stack(f, d), up=stack(f, d), down=stack(d, f))


def rows(tokens: int, d: int, device: str) -> torch.Tensor:
    """Gaussian bf16 [T, D]."""
    return torch.randn(tokens, d, generator=torch.Generator().manual_seed(d)).bfloat16().to(device)


def no_tokens(arm: str, format: str, device: str) -> None:
    """G01: [0, D] of the right dtype and no launch."""
    y = layer(4, 2, 64, 64, format, device)(rows(0, 64, device), arm)
    assert y.out.shape == (0, 64)
    assert y.out.dtype == torch.bfloat16
    assert y.timing.launches == 0


def experts_without_tokens(arm: str, format: str, device: str) -> None:
    """G02: counts 3, 0, 5, 0: close to the reference, nothing of old memory."""
    own, x = layer(4, 1, 64, 64, format, device), rows(8, 64, device)
    picks = torch.tensor([0, 2, 2, 0, 2, 2, 0, 2], device=device)[:, None]
    routing = Routing(picks, torch.ones(8, 1, device=device))
    got = own(x, arm, routing=routing).out
    assert got.isfinite().all()
    assert nmse(got, own(x, "reference", routing=routing).out) <= tol("bench/layer")


def one_expert_takes_all(arm: str, format: str, device: str) -> None:
    """G04: 257 tokens of expert 5 of 8."""
    own, x = layer(8, 1, 64, 64, format, device), rows(257, 64, device)
    routing = Routing(torch.full((257, 1), 5, device=device), torch.ones(257, 1, device=device))
    got = own(x, arm, routing=routing).out
    assert nmse(got, own(x, "reference", routing=routing).out) <= tol("bench/layer")


def a_row_in_any_batch(arm: str, format: str, device: str) -> None:
    """G17: row 0 alone and first of 2, 17, 64 and 513, K = 4096: the same bits."""
    own, x = layer(1, 1, 4096, 64, format, device), rows(BATCHES[-1], 4096, device)
    alone = own(x[:1], arm).out
    for n in BATCHES[1:]:
        assert torch.equal(own(x[:n], arm).out[:1], alone), n


def the_first_call(arm: str, format: str, device: str) -> None:
    """G20: a layer's first call has the second's bits, whatever was measured or compiled on its way."""
    own, x = layer(4, 2, 64, 64, format, device), rows(40, 64, device)
    first = own(x, arm).out.clone()
    assert torch.equal(own(x, arm).out, first)


FAULTS = [no_tokens, experts_without_tokens, one_expert_takes_all, a_row_in_any_batch, the_first_call]
