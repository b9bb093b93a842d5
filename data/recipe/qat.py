"""Quantisation-aware training of the routed experts: the forward pass sees what the file will hold.

Straight-through: w_used = w + delta with delta = dequantise(quantise(bf16(w))) - w held constant, so the gradient of
w_used is taken as the gradient of w. The quantisers are those that write the file (`moe_lab.formats`), and w is
rounded to bf16 first because the saved weights are bf16: quantising them later gives the same codes.

The parametrisation also casts to the compute dtype: `grouped_mm` is not autocast-enabled, with fp32 weights it would
run in fp32.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from data.recipe.config import ROUTED_FORMATS
from moe_lab.formats import get_format


class FakeQuant(nn.Module):
    """Parametrisation of an [E, N, Kd] expert tensor: off, the weight itself; on, what the file would give back."""

    def __init__(self, format_name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.format, self.dtype, self.enabled = get_format(format_name), dtype, False
        self.delta: Tensor | None = None

    def forward(self, weight: Tensor) -> Tensor:
        if self.enabled and self.delta is not None:
            weight = weight + self.delta
        return weight.to(self.dtype)


@dataclass
class _Group:
    """One kind of expert tensor in all layers, quantised in one go.

    Why together: the scale search is thousands of small elementwise kernels, so on a GPU its time is launches, not
    data; six layers at once cost little more than one.
    """

    quants: list[FakeQuant]
    weights: list[nn.Parameter]
    seconds: float = 0.0

    @torch.no_grad()
    def refresh(self) -> None:
        latent, codec = torch.stack(list(self.weights)), self.quants[0].format
        stored = latent.to(torch.bfloat16).float()
        delta = codec.dequantize(codec.quantize(stored)).reshape(latent.shape) - latent
        for quant, layer in zip(self.quants, delta, strict=True):
            quant.delta = layer


class ExpertQuantiser:
    """All routed experts of a model. Starts switched off; `refresh_all` then `enable(True)` begins the QAT phase.

    `refresh_within(seconds)` spends about that much device time a call on refreshing groups in turn, so a slow
    quantiser makes the copies a few steps old instead of making the step long.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.groups: list[_Group] = []
        for name, format_name in ROUTED_FORMATS.items():
            group = _Group([], [])
            for layer in model.model.layers:
                quant, weight = FakeQuant(format_name, dtype), getattr(layer.mlp.experts, name)
                parametrize.register_parametrization(layer.mlp.experts, name, quant, unsafe=True)
                if layer.mlp.experts.parametrizations[name].original is not weight:
                    raise RuntimeError(f"parametrising {name} replaced the parameter; an optimizer would lose it")
                group.quants.append(quant)
                group.weights.append(weight)
            self.groups.append(group)
        self.enabled = False
        self._credit_s, self._next = 0.0, 0

    def enable(self, on: bool) -> None:
        self.enabled = on
        for group in self.groups:
            for quant in group.quants:
                quant.enabled = on

    def refresh_all(self) -> None:
        for group in self.groups:
            group.refresh()

    def measure(self) -> float:
        """Seconds for refreshing everything once, after a warm-up pass."""
        device = self.groups[0].weights[0].device
        self.refresh_all()
        for group in self.groups:
            _synchronize(device)
            start = time.perf_counter()
            group.refresh()
            _synchronize(device)
            group.seconds = time.perf_counter() - start
        return sum(group.seconds for group in self.groups)

    def refresh_within(self, seconds: float) -> None:
        self._credit_s += seconds
        for _ in self.groups:
            group = self.groups[self._next]
            if self._credit_s < group.seconds:
                return
            group.refresh()
            self._credit_s -= group.seconds
            self._next = (self._next + 1) % len(self.groups)
        self._credit_s = 0.0  # all fresh: what is left is not saved up


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The latent weights in bf16 under transformers' own names, parametrisation removed from the keys."""
    state = {}
    for name, value in model.state_dict().items():
        if ".parametrizations." in name:
            name = name.replace(".parametrizations.", ".").removesuffix(".original")
        state[name] = value.detach().to(torch.bfloat16).cpu().contiguous()
    return state


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
