"""The grouped GEMM compiles for Hopper, with one kind of tensor-core instruction in every tile and nothing spilled."""

import pytest

from tests.support.sm90 import facts_of


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    """variant -> facts."""
    return facts_of("compile_grouped_for_sm90")


def test_every_tile_and_format_is_machine_code(compiled: dict[str, dict]) -> None:
    assert len(compiled) == 25
    assert {v["target"] for v in compiled.values()} == {"sm_90a"}


def test_one_instruction_for_one_row_and_for_hundreds(compiled: dict[str, dict]) -> None:
    """The tensor core's own order of addition is part of a row's bits."""
    assert {tuple(v["mma"]) for v in compiled.values()} == {("wgmma",)}


def test_nothing_is_spilled(compiled: dict[str, dict]) -> None:
    assert {name: v["stack"] for name, v in compiled.items() if v["stack"]} == {}


def test_arithmetic_is_what_the_references_do(compiled: dict[str, dict]) -> None:
    for name, facts in compiled.items():
        assert not facts["flushes"], f"{name}: subnormals are flushed"
        assert not facts["rough_division"], f"{name}: a division is not correctly rounded"
        assert not facts["tf32"], name
        if not name.startswith(("q4_k", "fp8-")):  # whose one fused step is asked for by name
            assert facts["fused"] == 0, f"{name}: products are fused into additions"


def test_rows_leave_16_bytes_at_a_time(compiled: dict[str, dict]) -> None:
    """Stores of single values cost more than the product itself where an expert has many rows."""
    floats = {tuple(v["stores"]) for name, v in compiled.items() if not name.startswith("fp8-gated")}
    # eight warps have four values of a small tile each
    assert floats <= {("v4.b32",), ("v2.b32",)}
    assert [name for name, v in compiled.items() if v["stores"] == ["v2.b32"]] == ["q2_k-gated-16"]
    # quantised rows are half as wide, and have a scale beside them
    assert all({"v2.b32", "v4.b32"} & set(v["stores"]) for v in compiled.values())
