"""The int8 grouped product compiles for Hopper: int8 tensor cores, nothing spilled, no product fused unasked."""

import pytest

from tests.support.sm90 import facts_of

# the launches that lay scales and sums out, or take weights apart; the products themselves fuse where their code asks
# for it: `primitives.fma`
BEFORE = ("sides-", "open-")


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    """variant -> facts."""
    return facts_of("compile_mmq_for_sm90")


def test_every_kind_is_machine_code(compiled: dict[str, dict]) -> None:
    assert len(compiled) == 2 * (8 + 7)
    assert {v["target"] for v in compiled.values()} <= {"sm_90", "sm_90a"}


def test_the_tensor_cores_multiply(compiled: dict[str, dict]) -> None:
    """Exact forms by the instruction of a warp, whose sums start from a constant; folded ones by that of four."""
    for name, facts in compiled.items():
        if not name.startswith(BEFORE):
            assert facts["mma"] == (["wgmma"] if "q8_k" in name else ["mma.sync"]), name


def test_nothing_is_spilled(compiled: dict[str, dict]) -> None:
    assert {name: v["stack"] for name, v in compiled.items() if v["stack"]} == {}


def test_codes_are_made_in_the_operands_registers(compiled: dict[str, dict]) -> None:
    """Of few rows' raw blocks: barriers are those of the loop's copies, none is for codes in shared memory."""
    for name in ("q3_k-d4-16", "q5_k-ds4-16", "q2_k-d2s6-gated-16"):
        assert compiled[name]["barriers"] <= 8, name


def test_arithmetic_is_what_the_reference_does(compiled: dict[str, dict]) -> None:
    for name, facts in compiled.items():
        assert not facts["flushes"], f"{name}: subnormals are flushed"
        assert not facts["rough_division"], f"{name}: a division is not correctly rounded"
        assert facts["fused"] == 0 or not name.startswith(BEFORE), f"{name}: products are fused into additions"


def test_rows_leave_16_bytes_at_a_time(compiled: dict[str, dict]) -> None:
    assert {tuple(v["stores"]) for name, v in compiled.items() if not name.startswith(BEFORE)} == {("v4.b32",)}
