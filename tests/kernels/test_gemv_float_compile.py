"""The float GEMV compiles for Hopper: wide loads, nothing spilled, sums that stay in the threads that make them."""

import pytest

from tests.support.sm90 import facts_of


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    """variant -> facts."""
    return facts_of("compile_float_for_sm90")


def in_lanes(compiled: dict[str, dict]) -> dict[str, dict]:
    """Without the tensor cores' forms."""
    return {name: v for name, v in compiled.items() if not v["mma"]}


def test_every_form_is_machine_code(compiled: dict[str, dict]) -> None:
    assert len(compiled) == 16
    lanes = in_lanes(compiled).values()
    assert {v["registers"] for v in lanes} == {80, 96, 128}, "each tile that is used"
    assert {v["target"] for v in compiled.values()} <= {"sm_90", "sm_90a"}
    assert all(v["waits"] for v in lanes), "early starts wait for the kernel before"


def test_nothing_is_spilled(compiled: dict[str, dict]) -> None:
    assert {name: v["stack"] for name, v in compiled.items() if v["stack"]} == {}


def test_weights_come_16_bytes_at_a_time_and_8_of_nvfp4(compiled: dict[str, dict]) -> None:
    for name, facts in in_lanes(compiled).items():
        wide = "v4.b32" if name.startswith("bf16") else "b64" if name.startswith("nvfp4") else "v2.b64"
        assert wide in facts["loads"], (name, facts["loads"])


def test_arithmetic_is_what_the_reference_does(compiled: dict[str, dict]) -> None:
    for name, facts in compiled.items():
        assert not facts["flushes"], f"{name}: subnormals are flushed"
        assert not facts["rough_division"], f"{name}: a division is not correctly rounded"
        assert not facts["tf32"], name


def test_sums_stay_in_the_threads_that_make_them(compiled: dict[str, dict]) -> None:
    assert {name: facts["shared"] for name, facts in in_lanes(compiled).items() if facts["shared"]} == {}


def test_thread_i_of_a_warp_has_lane_i_of_the_tensor_cores_products(compiled: dict[str, dict]) -> None:
    """Laid otherwise the instruction multiplies other words than meant."""
    lanes = {name: v["lanes"] for name, v in compiled.items() if v["mma"]}
    assert {name.split("-")[0] for name in lanes} == {"int4_g32", "int4_g64", "int4_g128"}
    assert set(map(tuple, lanes.values())) == {("1, 1, 1, 32",)}


def test_whole_rows_and_words_are_loaded_for_the_tensor_cores(compiled: dict[str, dict]) -> None:
    words = {"int4_g32": "nc.b32", "int4_g64": "nc.v2.b32", "int4_g128": "nc.v4.b32"}
    for name, facts in compiled.items():
        if facts["mma"]:
            narrow = {"nc.b16"} if name.endswith("odd") else set()
            assert {"v4.b32", words[name.split("-")[0]], *narrow} <= set(facts["loads"]), name
            assert ("nc.b16" in facts["loads"]) == bool(narrow), name
