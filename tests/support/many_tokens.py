"""A layer so narrow that more tokens than the 65,535 of a grid's second axis cost nothing, and what holds for it."""

import torch

from moe_lab.layer import MoELayer
from moe_lab.parity import nmse
from moe_lab.routing import Routing
from moe_lab.spec import MoESpec, RouterSpec
from moe_lab.tolerances import tol

TOKENS = (65_535, 65_536, 70_001)
WIDTH = 16


def narrow_layer(device: str = "cpu") -> MoELayer:
    """bf16, 4 experts of 16 x 16, one a token."""
    draw = torch.Generator().manual_seed(13)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=draw) * shape[-1] ** -0.5).to(device)

    gate, up, down = (normal(4, WIDTH, WIDTH).bfloat16() for _ in range(3))
    return MoELayer.from_tensors(
        MoESpec(RouterSpec(4, 1), WIDTH, WIDTH), router=normal(4, WIDTH), gate=gate, up=up, down=down
    )


def check(tokens: int, arm: str, device: str = "cpu") -> None:
    """All rows are close to the reference's; those at powers of two and at the end have the bits they have alone."""
    layer = narrow_layer(device)
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens)).bfloat16().to(device)
    got = layer(x, arm)
    assert nmse(got.out, layer(x, "reference", routing=got.routing).out) <= tol("store/bf16")
    for t in (0, 32_767, 32_768, 65_534, tokens - 1):
        routing = Routing(got.routing.ids[t : t + 1], got.routing.weights[t : t + 1])
        assert torch.equal(layer(x[t : t + 1], arm, routing=routing).out[0], got.out[t]), t
