"""What stands around the experts of a layer: the router's logits, the way in, and the way out.

In: x [T, D] itself, its norm, or its latent projection. Out: the weighted sum, scaled, projected back, joined with the
shared expert, normed and added to the residual, as the spec says. Sums and norms in fp32 (the router's in float64,
rounded once); what an engine would store between two steps passes through `store`, the dtype of the layer's input.
"""

from collections.abc import Callable

import torch

from moe_lab._types import Float, Float32, Tensor
from moe_lab.arms.dense import linear, widened
from moe_lab.spec import MoESpec
from moe_lab.weights import Latent, ResidualNorms, RouterWeights
from moe_lab_kernels.backend import backend_of
from moe_lab_kernels.route import router as router_kernel

Store = Callable[[Tensor], Tensor]


def router_logits(x: Float[Tensor, "T D"], router: RouterWeights, spec: MoESpec) -> Float32[Tensor, "T R"]:
    """x W^T (+ bias). A normed router input is rms_norm(x) * input_scale * D^-1/2, in float64, rounded to fp32.

    In torch the product runs in float64 and is rounded once; the kernel adds fp32 in one order for any number of rows.
    """
    if spec.router_input == "normed":
        assert router.input_scale is not None
        normed = rms_norm(x.double(), None, spec.norm_eps) * router.input_scale.double() * spec.d_model**-0.5
        x = normed.float()
    product = router_kernel.router_ref if backend_of(x) == "torch" else router_kernel.router
    return product(x, router.weight, router.bias)


def rms_norm(x: Float[Tensor, "T D"], weight: Tensor | None, eps: float) -> Float[Tensor, "T D"]:
    """x * rsqrt(mean x^2 + eps) * weight (the weight itself, not 1 + weight), in x's dtype.

    The mean and its root in float64, rounded once: a row's bits then depend on no batch, however a device adds.
    """
    scale = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps).to(x.dtype)
    return x * scale if weight is None else x * scale * weight.to(x.dtype)


def is_plain(spec: MoESpec) -> bool:
    """Whether the output is the weighted sum plus the shared expert and no more, so that one kernel may do both."""
    scaled = spec.router.scale_on == "output" and spec.router.scale != 1
    averaged = spec.shared is not None and spec.shared.combine == "average"
    return not (scaled or averaged or spec.latent or spec.feed_forward == "normed_residual")


def routed_rows(
    x: Float[Tensor, "T D"], spec: MoESpec, latent: Latent | None, norms: ResidualNorms | None, store: Store
) -> Float[Tensor, "T Dr"]:
    """The rows that the routed experts read; x itself where nothing stands before them."""
    if norms is not None:
        x = store(rms_norm(widened(x), norms.routed_in, spec.norm_eps))
    return x if latent is None else store(linear(x, latent.enter))


def shared_rows(x: Float[Tensor, "T D"], spec: MoESpec, norms: ResidualNorms | None, store: Store) -> Tensor:
    """The rows that the shared expert reads."""
    return x if norms is None else store(rms_norm(widened(x), norms.shared_in, spec.norm_eps))


def branch_rows(shared: Float[Tensor, "T D"], spec: MoESpec, norms: ResidualNorms | None, store: Store) -> Tensor:
    """What the shared expert's branch hands to the sum: its rows, normed where the spec norms them."""
    return shared if norms is None else store(rms_norm(widened(shared), norms.shared_out, spec.norm_eps))


def leave(
    routed: Float[Tensor, "T Dr"],
    shared: Float[Tensor, "T D"] | None,
    x: Float[Tensor, "T D"],
    spec: MoESpec,
    latent: Latent | None,
    norms: ResidualNorms | None,
    store: Store,
) -> Float[Tensor, "T D"]:
    """The layer's output in fp32 (of float64 rows in float64) from the weighted sum and the shared branch's rows
    (`branch_rows`, already gated)."""
    if spec.router.scale_on == "output":
        routed = routed * spec.router.scale
    if latent is not None:
        routed = widened(store(linear(store(routed), latent.leave)))
    if norms is not None:
        assert shared is not None
        total = widened(shared) + widened(store(rms_norm(routed, norms.routed_out, spec.norm_eps)))
        return (widened(x) + rms_norm(total, norms.out, spec.norm_eps)) * norms.layer_scalar.float()
    if shared is None:
        return routed
    assert spec.shared is not None
    total = routed + widened(shared)
    return total / 2 if spec.shared.combine == "average" else total
