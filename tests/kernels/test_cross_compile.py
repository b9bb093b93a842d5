"""Kernels of every kind compile for Hopper without a GPU, and the code says what they promise (no spills: the table of
every variant, tests/unit/test_variants.py)."""

import pytest

from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.planar_layout import PIECES
from tests.support.compile_for_sm90 import MLP_MANY, MLP_PAIRS
from tests.support.sm90 import facts_of

GEMV = {
    "gemv-q2_k-bf16-rows8-two",
    "gemv-q2_k-f16-rows1",
    "gemv-q2_k-f16-rows1-two-addresses",
    "gemv-q3_k-bf16-rows8-scatter",
    "gemv-q8_0-f32-rows8",
    "gemv-planar-q3_k-bf16-rows1",
    "gemv-q2_k-f32-rows1-twin",
}
# first the quantisation of x, then the experts
MLP = {f"mlp-{pair}-rows1-1" for pair in MLP_PAIRS} | {f"mlp-{pair}-rows8-1" for pair in MLP_MANY}
ONE_WARP = {
    "topk-R128-K8-normalised",
    "topk-R256-K8-top2-groups-bias",
    "topk-bf16",
}
SEVERAL_WARPS = {
    "topk-R384-K6-sqrt-softplus-bias",
    "topk-R768-K12-zero-experts-bias",
    "topk-R257-K16-softcap-temperature",
}
ROUTING = (
    ONE_WARP
    | SEVERAL_WARPS
    | {
        "route_table-T1",
        "route_table-T8-everyone",
        "slot_table-T1",
        "slot_table-T8-everyone",
        "route_plan-T1",
        "route_plan-T8",
        "plan-T1",
        "plan-T8192",
        "plan-T8192-1",
        "plan-T8192-2",
    }
)
TENSOR_CORES = {"router-T1-bfloat16", "router-T300-bfloat16", "router-T3000-bfloat16"}
ROUTERS = TENSOR_CORES | {"router-T1-bfloat16-1", "router-T300-bfloat16-1", "router-T3000-float32"}
DEQUANTIZE = {f"dequantize-{format}" for format in BLOCKS} | {f"dequantize-planar-{format}" for format in PIECES}
FP4 = ("nvfp4_modelopt", "nvfp4_ct", "mxfp4_oss")
SCALED = {f"scaled-{format}" for format in ("fp8_block", *FP4, "mxfp8", "int4_g64", "int8_g64")}
TRANSPOSED = {f"transposed-{format}" for format in FP4}
FEW = {f"quantize-{layout}-few" for layout in ("d4", "ds4", "d2s6", "q8_k")}
MANY = {f"quantize-{layout}-many" for layout in ("d4", "ds4", "d2s6", "q8_k", "fp8")}
QUANTIZE = (
    FEW
    | MANY
    | {
        "quantize-float32",
        "quantize-float16",
        "quantize-bfloat16",
        "quantize-d2s6-safe-f32",
        "quantize-fp8-e8m0-f32",
    }
)
OTHERS = (
    {
        "swiglu-f32",
        "swiglu-bf16-limit-strided",
        "geglu-bf16",
        "combine-bf16",
        "combine-bf16-everything",
        "shared_gate-bf16",
        "dot-f32",
    }
    | ROUTING
    | ROUTERS
    | DEQUANTIZE
    | SCALED
    | TRANSPOSED
    | {f"{way}-{format}" for way in ("repack", "restore") for format in ("q8_0", "q3_k", "q4_k")}
    | QUANTIZE
    | MLP
    | {name.removesuffix("-1") for name in MLP}
)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    """variant -> facts."""
    return facts_of("compile_for_sm90")["variants"]


def test_every_variant_became_machine_code(compiled: dict[str, dict]) -> None:
    assert set(compiled) == GEMV | OTHERS
    assert {v["target"] for v in compiled.values()} <= {"sm_90", "sm_90a"}
    assert min(v["cubin"] for v in compiled.values()) > 1000


@pytest.mark.parametrize("variant", sorted(GEMV | OTHERS))
def test_arithmetic_is_what_the_references_do(compiled: dict[str, dict], variant: str) -> None:
    facts = compiled[variant]
    assert not facts["flushes"], "subnormals are flushed"
    assert not facts["rough_division"], "a division is not correctly rounded"
    assert not facts["tf32"]
    if variant not in ("dot-f32", "router-T3000-float32"):  # a dot is a sum of fused products by nature
        assert facts["fused"] == 0, "products are fused into additions"


@pytest.mark.parametrize("variant", sorted(GEMV))
def test_byte_dots_are_instructions_or_their_twins(compiled: dict[str, dict], variant: str) -> None:
    assert (compiled[variant]["dp4a"] > 0) == (not variant.endswith("twin"))


@pytest.mark.parametrize("variant", sorted(GEMV))
def test_words_stay_in_the_threads_that_load_them(compiled: dict[str, dict], variant: str) -> None:
    assert compiled[variant]["shared_stores"] == 0


def test_codes_of_planes_are_fetched_16_bytes_at_a_time(compiled: dict[str, dict]) -> None:
    """One load for a lane's 64 values of each weight row: eight a program, two side by side on a warp."""
    assert compiled["gemv-planar-q3_k-bf16-rows1"]["wide_loads"] == 4


@pytest.mark.parametrize("variant", sorted(MLP))
def test_programs_that_wait_look_past_the_l1_cache(compiled: dict[str, dict], variant: str) -> None:
    """At gate's products and at up's, and at the count of hidden blocks, which one release makes known."""
    assert compiled[variant]["looks"] >= 3
    assert compiled[variant]["releases"] == 1


@pytest.mark.parametrize("variant", sorted(ONE_WARP))
def test_a_row_is_routed_inside_one_warp(compiled: dict[str, dict], variant: str) -> None:
    assert compiled[variant]["barriers"] == 0


@pytest.mark.parametrize("variant", sorted(TENSOR_CORES))
def test_every_router_form_uses_one_instruction(compiled: dict[str, dict], variant: str) -> None:
    """The tensor core's own order of addition is part of a row's bits."""
    assert compiled[variant]["mma"] == ["mma.sync"]


@pytest.mark.parametrize("variant", sorted(DEQUANTIZE | SCALED | TRANSPOSED))
def test_decoded_values_are_stored_16_bytes_at_a_time_by_the_threads_that_made_them(
    compiled: dict[str, dict], variant: str
) -> None:
    facts = compiled[variant]
    assert facts["barriers"] == 0, "values go through shared memory"
    assert facts["stores"] == ["v4.b32"]


@pytest.mark.parametrize("variant", sorted(FEW))
def test_one_row_is_quantised_inside_single_warps(compiled: dict[str, dict], variant: str) -> None:
    assert compiled[variant]["barriers"] == 0


@pytest.mark.parametrize("variant", sorted(MANY))
def test_many_rows_store_codes_16_bytes_at_a_time(compiled: dict[str, dict], variant: str) -> None:
    assert "v4.b32" in compiled[variant]["stores"]
