"""Decode arms where torch computes: every format, widths of 256 to 2,880, experts of 1 to 9 rows, both orders of the
sum and both store modes against the reference within the table; tokens alone have their bits. `make sweep` takes every
pair of widths with every call, here a quarter of them run."""

import os

import pytest
import torch

from moe_lab.arms import ARMS
from moe_lab.errors import LabError
from moe_lab.execution.options import Options
from moe_lab.parity import nmse
from moe_lab.routing import Routing
from moe_lab.tolerances import tol
from moe_lab_kernels.gemv_float.steps import WALKS
from moe_lab_kernels.storage.blocks import GEMV_FORMATS
from tests.support import wide_layers as wl

EVERY = os.environ.get("MOE_LAB_SWEEP")  # set by `make sweep`
BLOCKS_OF_256 = {"q2_k", "q3_k", "q4_k", "q5_k", "q6_k"}


def test_the_cases_leave_nothing_out() -> None:
    assert {n for rows in wl.ROWS for n in rows} == set(range(1, 10))
    quarter, whole = wl.cases(), wl.every_case()
    decoded_alone = {"q4_1", "q5_0", "q5_1", "iq4_nl", "iq4_xs"}
    for taken in (quarter, whole):
        assert {c[0] for c in taken} == set(WALKS) - decoded_alone
        for format in wl.FORMATS:
            own = [c[1:] for c in taken if c[0] == format]
            narrow = format in BLOCKS_OF_256 or format.endswith("_g128")
            allowed = {256, 2304} if narrow else {256, 704, 2304, 2880}
            assert {d for d, _, _ in own} == allowed == {f for _, f, _ in own}, format
            assert {call for *_, calls in own for call in calls} == {0, 1, 2, 3}
            assert len(own) == (len(allowed) ** 2 if taken is whole else len(allowed))
    assert {c[1:3] for c in quarter} == {c[1:3] for c in whole}, "a quarter of the cases, yet every pair of widths"


@pytest.mark.parametrize(("format", "d", "f", "calls"), wl.every_case() if EVERY else wl.cases(), ids=str)
def test_against_the_reference(format: str, d: int, f: int, calls: tuple[int, ...]) -> None:
    layer, x = wl.make(format, d, f), wl.rows(d)
    for call in calls:
        options, routing = Options(**wl.SETTINGS[call]), wl.picks(call)
        want = layer(x, "reference", routing=routing, options=options).out
        got = layer(x, "gemv", routing=routing, options=options).out
        assert nmse(got, want) <= tol(wl.row_of(format)), call
        alone = Routing(routing.ids[:1], routing.weights[:1])
        for arm in ("table",) if call % 2 else ("table", "per_token"):
            assert torch.equal(layer(x[:1], arm, routing=alone, options=options).out, got[:1]), (arm, call)
        if format in GEMV_FORMATS and call in (0, 3):
            policy = layer(x, "gemv_mmq", routing=routing, options=options).out
            assert nmse(policy, want) <= tol("mmq/layer" if 9 in wl.ROWS[call] else wl.row_of(format)), call
    if calls[0] == 0:
        assert torch.equal(layer(x, "per_token", routing=routing, options=options).out, got)


def test_the_policy_needs_a_prefill_arm_for_the_format() -> None:
    with pytest.raises(LabError, match="its part 'mmq'"):
        wl.make("bf16", 256, 2880)(wl.rows(256), "gemv_mmq", routing=wl.picks(0))
    assert ARMS["gemv_mmq"].ranges[0].rows == 8  # type: ignore[attr-defined]
