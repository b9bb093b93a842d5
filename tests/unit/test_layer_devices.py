"""What lies beside a layer's experts goes where they are, or is refused where it has no values."""

from dataclasses import replace

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab.layer import MoELayer
from moe_lab.weights import RouterWeights, SharedWeights, on_device
from tests.support.decode_layers import decode_layer

LAYER = decode_layer(("q8_0",) * 3, experts=4, top_k=2)


def built(router: RouterWeights, shared: SharedWeights | None) -> MoELayer:
    return MoELayer(LAYER.spec, router, LAYER.experts, shared)


def test_a_router_without_values_is_refused() -> None:
    with pytest.raises(LabError, match=r"RouterWeights.weight is on meta, without values, and the layer on cpu"):
        built(on_device(LAYER.router_weights, "meta"), LAYER.shared)


def test_a_shared_experts_gate_without_values_is_refused() -> None:
    assert LAYER.shared is not None
    assert isinstance(LAYER.shared.gate_vector, torch.Tensor)
    shared = replace(LAYER.shared, gate_vector=LAYER.shared.gate_vector.to("meta"))
    with pytest.raises(LabError, match=r"SharedWeights.gate_vector is on meta, without values"):
        built(LAYER.router_weights, shared)


def test_a_record_goes_where_it_is_sent() -> None:
    assert on_device(LAYER.router_weights, "meta").weight.device.type == "meta"
    assert on_device(LAYER.router_weights, "cpu").weight.device.type == "cpu"
