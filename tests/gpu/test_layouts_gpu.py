"""Experts in planes and tiles on a GPU: bits by every route, resident and streamed, and what streaming them costs."""

import pytest
import torch

import moe_lab as lab
from moe_lab.stream.memory_source import MemorySource
from moe_lab.tolerances import tol
from tests.support.decode_layers import decode_layer, decode_rows
from tests.support.kernel_cases import nmse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none"),
]
LAYOUTS = ("planar", "tiles")
BLOCKS = [("q2_k", "q2_k", "q3_k"), ("q4_k", "q5_k", "q6_k"), ("q8_0", "q8_0", "q4_0")]
FORMATS = {"planar": [*BLOCKS, ("mxfp4", "mxfp4", "nvfp4")], "tiles": BLOCKS}
CASES = [(layout, formats) for layout, every in FORMATS.items() for formats in every]


@pytest.mark.parametrize(("layout", "formats"), CASES, ids=str)
def test_a_layer_has_the_same_bits_by_every_route(layout: str, formats: tuple[str, ...]) -> None:
    raw, x = decode_layer(formats, device="cuda"), decode_rows(8).cuda()
    layer = raw.repacked(layout)
    assert all(torch.equal(a.data, b.to_raw().data) for a, b in zip(
        raw.experts.by_slot.parts.values(), layer.experts.by_slot.parts.values(), strict=True))  # fmt: skip
    want = layer(x, "gemv").out
    row = "gemv/q4_0 layer" if "q4_0" in formats else "gemv/layer"
    assert nmse(want.cpu(), raw(x, "reference").out.cpu()) <= tol(row)
    for options in ({"routing": "device"}, {"shared": "fused"}, {"shared": "side"}, {"chunk_rows": 3}):
        assert torch.equal(layer(x, "gemv", options=lab.Options(**options)).out, want), options
    assert all(torch.equal(layer(x[t : t + 1], "table").out, want[t : t + 1]) for t in range(len(x)))
    assert torch.equal(layer(x, "per_token").out, want)
    captured = layer.capture(len(x), "gemv")
    assert all(torch.equal(captured(x).out, want) for _ in range(100))


@pytest.mark.parametrize("arm", ["mmq", "grouped"])
def test_prefill_arms_on_planes_have_raws_bits(arm: str) -> None:
    raw = decode_layer(("q4_k", "q4_k", "q6_k"), device="cuda")
    x = torch.randn(200, raw.spec.d_model, generator=torch.Generator().manual_seed(4)).bfloat16().cuda()
    assert torch.equal(raw.repacked("planar")(x, arm).out, raw(x, arm).out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("locked", [False, True], ids=["file", "locked-memory"])
def test_streamed_experts_have_the_resident_layers_bits(layout: str, locked: bool) -> None:
    with lab.open(lab.sample(), layout=layout) as ckpt:
        x = torch.randn(6, 3, 256, generator=torch.Generator().manual_seed(4)).bfloat16().cuda()
        resident, source = ckpt.layer(2, "cuda"), ckpt.expert_source
        want = [resident(rows, "gemv").out for rows in x]
        if locked:
            source = MemorySource(source, locked=True).kept_as(layout)
        for slots in (1, 5, 32):
            with lab.ExpertCache(slots=slots) as cache:
                layer = lab.MoELayer.streamed(
                    resident.spec, router=resident.router_weights, source=source, layer=2, cache=cache,
                    shared=resident.shared, device="cuda",
                )  # fmt: skip
                for options in (lab.Options(), lab.Options(routing="device")):
                    outs = [layer(rows, "gemv", options=options).out for rows in x]
                    assert all(map(torch.equal, outs, want)), (slots, options)
