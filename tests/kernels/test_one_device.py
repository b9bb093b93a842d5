"""Every tensor that a decode launch reads or writes lies on one device, or the call is refused by the tensor's name."""

from collections.abc import Callable

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab_kernels.gemv import chunk_bias, gemv
from moe_lab_kernels.gemv_float import gemv_float as gf
from moe_lab_kernels.gemv_float.operands import Bias, Gate
from tests.support import float_cases as fc
from tests.support.kernel_cases import gemv_case

pytestmark = pytest.mark.usefixtures("interpreter")
N, KD, P = 5, 256, 4


def away(t: torch.Tensor) -> torch.Tensor:
    return t.to("meta")


def values() -> torch.Tensor:
    return torch.ones(2, N)


def float_call(bias: Bias | None = None, **changed: torch.Tensor) -> None:
    """A product with int4 weights; `changed`: `to` of its pairs, or a part of the weight."""
    rows, pairs, w = fc.rows_of(P, KD, torch.bfloat16), fc.pairs_of((P,), P), fc.weight("int4_g64", N, KD)
    pairs = pairs._replace(**{name: t for name, t in changed.items() if name == "to"})
    w = w._replace(**{name: t for name, t in changed.items() if name != "to"})
    gf.gemv_float(rows, pairs, w, torch.empty(P, N), bias=bias)


def gated_call(gate: torch.Tensor, up: torch.Tensor, how: Gate = Gate()) -> None:  # noqa: B008
    rows, pairs, w = fc.rows_of(P, KD, torch.bfloat16), fc.pairs_of((P,), P), fc.weight("bf16", N, KD)
    gf.gemv_float_gated(rows, pairs, w, w, torch.empty(P, N), gate_bias=Bias(gate), up_bias=Bias(up), how=how)


def q8_call(moved: int | None = None, **more: torch.Tensor) -> None:
    """A q4_0 product; `moved`: which of codes, scales and totals lies elsewhere."""
    c = gemv_case("q4_0", N, 64, [2])
    rows = [*c.rows, torch.zeros_like(c.rows[1])]
    if moved is not None:
        rows[moved] = away(rows[moved])
    gemv.gemv((rows[0], rows[1], rows[2]), c.row_of, c.w, c.chunks, "q4_0", torch.empty(2, N), **more)


def bias_call(bias: torch.Tensor, **more: torch.Tensor) -> None:
    chunks = fc.pairs_of((P,), P).chunks
    chunk_bias.chunk_bias(torch.ones(P, N), chunks, bias, torch.empty(P, N), n_slots=2, **more)


INT4 = fc.weight("int4_g64", N, KD)
CALLS: dict[str, tuple[str, Callable[[], None]]] = {
    "float-bias": ("bias", lambda: float_call(Bias(away(values())))),
    "float-bias-rows": ("bias.row_of", lambda: float_call(Bias(values(), away(torch.zeros(P, dtype=torch.int32))))),
    "float-to": ("to", lambda: float_call(to=away(torch.arange(P, dtype=torch.int32)))),
    "float-scales": ("part 1", lambda: float_call(scales=away(INT4.scales))),
    "float-second": ("part 2", lambda: float_call(second=away(INT4.second))),
    "gated-bias": ("bias", lambda: gated_call(away(values()), values())),
    "gated-second-bias": ("second bias", lambda: gated_call(values(), away(values()))),
    "gated-weight": ("weight", lambda: gated_call(values(), values(), Gate(weight=away(torch.ones(P))))),
    "scale": ("scale", lambda: q8_call(1)),
    "total": ("total", lambda: q8_call(2)),
    "out_row": ("out_row", lambda: q8_call(out_row=away(torch.arange(2, dtype=torch.int32)))),
    "chunk-bias": ("bias", lambda: bias_call(away(values()))),
    "chunk-bias-rows": ("row_of", lambda: bias_call(values(), row_of=away(torch.zeros(P, dtype=torch.int32)))),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_tensor_of_another_device_is_named(case: str) -> None:
    name, call = CALLS[case]
    with pytest.raises(LabError, match=rf"is on cpu but {name} is on meta; all tensors must share one device"):
        call()


def test_the_same_calls_run_on_one_device() -> None:
    float_call(Bias(values()))
    gated_call(values(), values())
    q8_call()
    bias_call(values())
