"""A tiny layer in the interpreter, fresh rows each time: one set of bits, whoever routes and however.

Five calls a repeat, of 5 to 11 launches that take some 70 ms of processor time each: a hundred repeats take minutes and
are part of `make sweep`; `make test` does two. `tests/gpu/test_device_routing_gpu.py` does a hundred in every format.
"""

import functools
import os

import pytest
import torch

from moe_lab.execution.options import Options
from moe_lab.formats import quantize
from moe_lab.layer import MoELayer, SharedWeights
from moe_lab.spec import MoESpec, RouterSpec, SharedSpec

pytestmark = pytest.mark.usefixtures("interpreter")
E, K, D, F = 2, 1, 64, 64
REPEATS = 100 if os.environ.get("MOE_LAB_SWEEP") else 2
ROWS = (8, 1, 5, 2, 7, 3, 6, 4)
FORMS = {
    "one row a chunk": Options(chunk_rows=1),
    "fused, on the device": Options(routing="device", shared="fused"),
    "side stream": Options(shared="side"),
}


@functools.cache
def layer() -> MoELayer:
    draw = torch.Generator().manual_seed(3)

    def part(*shape: int):
        return quantize(torch.randn(*shape, generator=draw) / shape[-1] ** 0.5, "q8_0")

    shared = SharedWeights(part(F, D), part(F, D), part(D, F))
    spec = MoESpec(RouterSpec(E, K), D, F, shared=SharedSpec(F))
    router = torch.randn(E, D, generator=draw)
    return MoELayer.from_tensors(
        spec, router=router, gate=part(E, F, D), up=part(E, F, D), down=part(E, D, F), shared=shared
    )


def test_every_form_has_the_same_bits() -> None:
    draw = torch.Generator().manual_seed(4)
    for repeat in range(REPEATS):
        x = torch.randn(ROWS[repeat % len(ROWS)], D, generator=draw).bfloat16()
        want = layer()(x, "gemv")
        assert want.timing.backend == "interpreter"
        assert torch.equal(layer()(x, "per_token").out, want.out), repeat
        for name, options in FORMS.items():
            assert torch.equal(layer()(x, "gemv", options=options).out, want.out), (repeat, name)
