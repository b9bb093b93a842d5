"""Decode arms on a GPU: widths of 256 to 2,880, experts of 1 to 9 rows, every setting, against the reference."""

import pytest
import torch

from moe_lab.execution.options import Options
from moe_lab.parity import nmse
from moe_lab.routing import Routing
from moe_lab.tolerances import tol
from moe_lab_kernels.storage.blocks import BLOCKS, GEMV_FORMATS
from tests.support import wide_layers as wl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none"),
]


# Blocks of 256 values leave one width beside 256; of the others those that fill no block of lanes.
IN_PLANES = [(f, 2304, 2304) if BLOCKS[f].values == 256 else (f, *widths)
             for f in GEMV_FORMATS for widths in ((704, 2880), (2880, 2304))]  # fmt: skip


@pytest.mark.parametrize(("format", "d", "f"), list(dict.fromkeys(IN_PLANES)), ids=str)
def test_planes_of_odd_widths(format: str, d: int, f: int) -> None:
    """Experts of nine rows, of one and of five, in few programs: each costs seconds to compile."""
    raw, x, routing = wl.make(format, d, f, "cuda"), wl.rows(d, "cuda"), wl.picks(0, "cuda")
    layer = raw.repacked("planar")
    got = layer(x, "gemv", routing=routing).out
    assert nmse(got, raw(x, "reference", routing=routing).out) <= tol(wl.row_of(format))
    assert torch.equal(layer(x, "per_token", routing=routing).out, got)


@pytest.mark.parametrize(("format", "d", "f"), [c[:3] for c in wl.every_case()], ids=str)
def test_every_setting_and_row_count(format: str, d: int, f: int) -> None:
    layer, x = wl.make(format, d, f, "cuda"), wl.rows(d, "cuda")
    for call in range(len(wl.ROWS)):
        for settings in wl.SETTINGS:
            options, routing = Options(**settings), wl.picks(call, "cuda")
            want = layer(x, "reference", routing=routing, options=options).out
            got = layer(x, "gemv", routing=routing, options=options).out
            assert nmse(got, want) <= tol(wl.row_of(format)), (call, settings)
            assert torch.equal(layer(x, "per_token", routing=routing, options=options).out, got), (call, settings)
            alone = Routing(routing.ids[:1], routing.weights[:1])
            assert torch.equal(layer(x[:1], "table", routing=alone, options=options).out, got[:1]), (call, settings)
            if format in GEMV_FORMATS:
                policy = layer(x, "gemv_mmq", routing=routing, options=options).out
                assert nmse(policy, want) <= tol("mmq/layer"), (call, settings)
