"""gpt-oss through the grouped arm, its prefill, against transformers' own module: biases, the clamped activation, and
the experts' weights in bf16 and as the released checkpoints have them, in mxfp4."""

from dataclasses import replace

import pytest
import torch

from moe_lab.formats import quantize
from moe_lab.layer import MoELayer
from moe_lab.parity import nmse
from moe_lab.tolerances import tol

pytest.importorskip("transformers")

from moe_lab import hf
from tests.support.moe_modules import BY_NAME, H, call


def both(format: str) -> tuple[torch.nn.Module, MoELayer]:
    """The module in fp32 and the layer, with the same weights: those that the format holds."""
    case = BY_NAME["gpt_oss"]
    gain = {"gate_up_proj": 3.0, "gate_up_proj_bias": 4.0, "down_proj_bias": 60.0}  # biases that outputs feel
    block = replace(case, settings={**case.settings, "intermediate_size": 64}, gain=gain).build().bfloat16()
    held = hf.from_module(block)
    stack = held.experts.stack  # type: ignore[union-attr]
    parts = {name: quantize(q.dequantize(), format) for name, q in stack.parts.items()}
    biases = {name: getattr(stack.biases, name) for name in parts}
    layer = MoELayer.from_tensors(held.spec, router=held.router_weights, biases=biases, **parts)
    block = block.float()
    with torch.no_grad():
        gate, up, down = (parts[name].dequantize().transpose(1, 2) for name in ("gate", "up", "down"))
        block.experts.gate_up_proj.copy_(torch.stack([gate, up], -1).flatten(-2))
        block.experts.down_proj.copy_(down)
    return block, layer


@pytest.mark.parametrize("tokens", [1, 77])
@pytest.mark.parametrize("format", ["bf16", "mxfp4_oss"])
def test_the_grouped_arm_is_the_module(format: str, tokens: int) -> None:
    block, layer = both(format)
    x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    y = layer(x, "grouped")
    assert y.arm == "grouped"
    assert layer.spec.limit_mode == "oai"
    assert 0 < nmse(y.out, call(block, x.float(), None)) <= tol("store/bf16")


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_a_lost_bias_is_noticed(part: str) -> None:
    block, layer = both("bf16")
    x = torch.randn(9, H, generator=torch.Generator().manual_seed(9)).bfloat16()
    getattr(layer.experts.stack.biases, part).zero_()  # type: ignore[union-attr]
    assert nmse(layer(x, "grouped").out, call(block, x.float(), None)) > 10 * tol("store/bf16")
