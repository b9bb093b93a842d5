"""Small layers for decode tests: routed experts and a shared one of the same formats and widths: all forms run."""

import torch

from moe_lab.formats import QuantTensor, quantize
from moe_lab.layer import MoELayer, SharedWeights
from moe_lab.spec import MoESpec, RouterSpec, SharedSpec
from moe_lab.weights import ResidualNorms, RouterWeights

E, K, D, F = 16, 4, 256, 256


def decode_layer(
    formats: tuple[str, ...] = ("q2_k", "q2_k", "q3_k"),
    *,
    experts: int = E,
    top_k: int = K,
    shared_formats: tuple[str, ...] | None = None,
    shared_width: int = F,
    device: str = "cpu",
    **spec,
) -> MoELayer:
    """A layer of genuinely quantised Gaussian weights; further settings of MoESpec by keyword."""
    g = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * shape[-1] ** -0.5

    shapes = ((experts, F, D), (experts, F, D), (experts, D, F))
    gate, up, down = (quantize(normal(*s), f).to(device) for s, f in zip(shapes, formats, strict=True))
    own = ((shared_width, D), (shared_width, D), (D, shared_width))
    parts = (quantize(normal(*s), f).to(device) for s, f in zip(own, shared_formats or formats, strict=True))
    shared = SharedWeights(*parts, normal(D).to(device))
    settings = {"shared": SharedSpec(shared_width, True), **spec}
    return MoELayer.from_tensors(
        MoESpec(RouterSpec(experts, top_k, normalize=True), D, F, **settings),
        router=normal(experts, D).to(device) * 4, gate=gate, up=up, down=down, shared=shared, number=2,
    )  # fmt: skip


def normed_layer(
    formats: tuple[str, ...] = ("int8_g64", "int8_g64", "int4_g64"), routed: str = "q8_0", device: str = "cpu"
) -> MoELayer:
    """A feed-forward half with norms around both branches, GELU experts, dense branch in `formats`."""
    g = torch.Generator().manual_seed(9)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * shape[-1] ** -0.5

    def norm() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(D, generator=g)).bfloat16().to(device)

    spec = MoESpec(
        RouterSpec(E, K, normalize=True), D, F, activation="gelu_tanh", shared=SharedSpec(F), router_input="normed",
        feed_forward="normed_residual",
    )  # fmt: skip
    shapes = ((E, F, D), (E, F, D), (E, D, F))
    gate, up, down = (quantize(normal(*s), routed).to(device) for s in shapes)
    shared = SharedWeights(*(quantize(normal(*s[1:]), f).to(device) for s, f in zip(shapes, formats, strict=True)))
    norms = ResidualNorms(*(norm() for _ in range(5)), torch.tensor([0.5], device=device))
    router = RouterWeights(normal(E, D).to(device) * 4, input_scale=norm().float())
    return MoELayer.from_tensors(spec, router=router, gate=gate, up=up, down=down, shared=shared, norms=norms)


def taken(q: QuantTensor, index: torch.Tensor) -> QuantTensor:
    """The matrices `index` of a stack, copied."""
    return QuantTensor.from_bytes(q.data[index.to(q.device)], q.format, (len(index), *q.shape[1:]))


def decode_rows(tokens: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Gaussian rows [T, D]."""
    return torch.randn(tokens, D, generator=torch.Generator().manual_seed(100 * seed + tokens)).to(dtype)
