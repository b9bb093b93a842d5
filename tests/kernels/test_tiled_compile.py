"""The GEMV on tiles compiles for Hopper, its instruction laid over lanes as it must be, and nothing spilled."""

import pytest

from moe_lab_kernels.storage.row_tiles import TILE_FORMATS
from tests.support.sm90 import facts_of

MLP = ("mlp-q2_k+q3_k-rows1", "mlp-q2_k+q3_k-rows8")


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    """variant -> facts."""
    return facts_of("compile_tiled_for_sm90")


def test_every_format_is_machine_code(compiled: dict[str, dict]) -> None:
    assert set(compiled) == {*MLP, *(f"product-{format}" for format in TILE_FORMATS)}


def test_thread_i_of_a_warp_has_lane_i_of_every_product(compiled: dict[str, dict]) -> None:
    """Laid otherwise the instruction multiplies other words than meant: seen on a GPU as sums many times too large."""
    assert {name: v["lanes"] for name, v in compiled.items()} == {name: ["1, 1, 1, 32"] for name in compiled}


def test_one_instruction_for_every_number_of_rows(compiled: dict[str, dict]) -> None:
    assert {tuple(v["mma"]) for v in compiled.values()} == {("mma.sync",)}


def test_codes_are_fetched_16_bytes_at_a_time(compiled: dict[str, dict]) -> None:
    assert min(v["wide_loads"] for v in compiled.values()) >= 2


def test_nothing_is_spilled(compiled: dict[str, dict]) -> None:
    assert {name: v["stack"] for name, v in compiled.items() if v["stack"]} == {}


def test_arithmetic_is_what_the_references_do(compiled: dict[str, dict]) -> None:
    for name, facts in compiled.items():
        assert not facts["flushes"], f"{name}: subnormals are flushed"
        assert not facts["rough_division"], f"{name}: a division is not correctly rounded"
        assert facts["fused"] == 0, f"{name}: products are fused into additions"


@pytest.mark.parametrize("variant", MLP)
def test_programs_that_wait_look_past_the_l1_cache(compiled: dict[str, dict], variant: str) -> None:
    """Products twice: several warps hold one, of which only one may have seen it when the loop ends."""
    assert compiled[variant]["looks"] >= 5
    assert compiled[variant]["releases"] == 1
