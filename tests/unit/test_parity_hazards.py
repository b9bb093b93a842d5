"""Activations of known statistics, and the hazards found in them."""

import pytest
import torch

import moe_lab as lab
from moe_lab.errors import LabError
from moe_lab.numerics.emulation import arithmetic_of, emulate, quantize_for
from moe_lab.parity import STATISTICS, Setting, draw, hazards, heavy_tailed, product_hazards, tail_trap, wide_layer
from moe_lab.parity.hazard import decorrelation, underflows

WIDTH = 1024


def weights(format: str) -> lab.QuantTensor:
    return lab.quantize(heavy_tailed(48, WIDTH), format)


@pytest.mark.parametrize("name", STATISTICS)
def test_rows_are_seeded(name: str) -> None:
    one, two, other = draw(name, 8, 64, seed=1), draw(name, 8, 64, seed=1), draw(name, 8, 64, seed=2)
    assert one.dtype == torch.float32
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_statistics_are_what_their_names_say() -> None:
    made = {name: draw(name, 512, 256) for name in STATISTICS}
    assert made["gaussian"].std() == pytest.approx(1.0, abs=0.02)
    assert made["tiny"].std() == pytest.approx(3e-5, rel=0.02)
    assert made["large mean"].mean() == pytest.approx(3e3, rel=0.02)
    loud = made["outliers"].std(0)
    assert int((loud > 30).sum()) == 8
    assert made["swiglu"].abs().amax() > 5 * made["swiglu"].std()
    with pytest.raises(LabError, match="gaussian, swiglu"):
        draw("cauchy", 1, 32)


def test_rows_and_weights_of_one_seed_have_nothing_in_common() -> None:
    x, w = draw("gaussian", 512, 256), heavy_tailed(64, 256)
    product = x.double() @ w.double().T / (x.double().norm(dim=1)[:, None] * w.double().norm(dim=1))
    assert product.abs().max() < 6 / 256**0.5  # one equal row would give nearly 1


def test_weights_have_heavier_tails_than_a_normal() -> None:
    w = heavy_tailed(64, 4096)
    kurtosis = float((w / w.std()).pow(4).mean())
    assert 4.5 < kurtosis < 9.0  # 6 for t with 6 degrees of freedom, 3 for a normal
    assert w.std() == pytest.approx(0.03 * 1.5**0.5, rel=0.02)


@pytest.mark.parametrize(("format", "ratio"), [("q2_k", 4.3), ("q4_k", 6.6), ("q5_k", 6.7), ("q4_0", 8.9)])
def test_decorrelation_is_the_ratio_of_powers(format: str, ratio: float) -> None:
    arm = "gemv" if format == "q4_0" else "mmq"
    q = weights(format)
    assert decorrelation(q, arithmetic_of(format, arm)) == pytest.approx(ratio, rel=0.2)
    assert decorrelation(q, arithmetic_of(format, "mmq" if format == "q4_0" else "gemv")) == 1.0


@pytest.mark.parametrize("format", ["q3_k", "q6_k", "q8_0", "mxfp4", "nvfp4"])
def test_symmetric_formats_have_nothing_to_decorrelate(format: str) -> None:
    for arm in ("gemv", "mmq"):
        assert decorrelation(weights(format), arithmetic_of(format, arm)) == 1.0


def test_tiny_rows_underflow_fp16_scales_and_no_fp32_ones() -> None:
    x = draw("tiny", 16, WIDTH)
    x[3] = 0.0  # a row of zeros has no scale to lose
    for arm, low in (("gemv", True), ("mmq", False)):
        rows = quantize_for(x, "q3_k", arithmetic_of("q3_k", arm))
        count, of = underflows(rows, x)
        assert of == rows.scale.numel()
        assert count == (15 * of // 16 if low else 0)


@pytest.mark.parametrize("format", ["q2_k", "q4_k", "q5_k"])
def test_sums_past_fp16_are_counted_make_nan_and_safe_sums_do_not(format: str) -> None:
    x, q = torch.full((4, WIDTH), 3000.0), weights(format)
    x = x if format != "q2_k" else 2 * x  # its sums are of 16 values
    prefill = arithmetic_of(format, "mmq")
    found = {row[0]: row for row in product_hazards(x, q, Setting("mmq"))}
    assert found["fp16 sum overflow"][3] == found["fp16 sum overflow"][4] > 0
    assert not emulate(x, q, prefill).isfinite().all()
    safe = Setting("mmq", lab.Arithmetic(safe_sum=True, sum="quantised"))
    assert emulate(x, q, safe.arithmetic(format)).isfinite().all()
    assert "fp16 sum overflow" not in {row[0] for row in product_hazards(x, q, safe)}
    assert emulate(x, q, arithmetic_of(format, "gemv")).isfinite().all()


def test_q4_0_has_it_the_other_way_round() -> None:
    x, q = torch.full((4, WIDTH), 3000.0), weights("q4_0")
    assert not emulate(x, q, arithmetic_of("q4_0", "gemv")).isfinite().all()
    assert emulate(x, q, arithmetic_of("q4_0", "mmq")).isfinite().all()


@pytest.mark.parametrize(
    ("tokens", "arms"),
    [(0, (0, 0)), (7, (0, 7)), (8, (0, 8)), (9, (9, 0)), (512, (512, 0)), (513, (512, 1)), (519, (512, 7)),
     (520, (512, 8)), (521, (521, 0)), (1024, (1024, 0)), (1031, (1024, 7))],
)  # fmt: skip
def test_tail_trap(tokens: int, arms: tuple[int, int]) -> None:
    assert tail_trap(tokens) == arms


def test_tail_trap_of_small_micro_batches_is_decode_throughout() -> None:
    assert tail_trap(20, micro_batch=8) == (0, 20)
    assert tail_trap(20, micro_batch=16) == (16, 4)


def test_a_layers_hazards_are_named_by_arm_and_part() -> None:
    layer = wide_layer(d_model=256, d_expert=256, experts=2, top_k=1)
    found = hazards(layer, 1e-5 * draw("gaussian", 519, 256), ["gemv", "mmq"])
    by = found.set_index(["hazard", "arm", "part"])["count"]
    assert by["fp16 scale underflow", "gemv", "gate"] == 519 * 8
    assert ("fp16 scale underflow", "mmq", "down") not in by.index  # d4 keeps fp32 scales
    assert by["fp16 sum overflow", "mmq", "up"] == 0
    assert by["tail trap", "gemv, mmq", ""] == 7
    factors = found[found.hazard == "raw-sum decorrelation"]
    assert set(factors.arm) == {"mmq"}
    assert set(factors.part) == {"gate", "up"}
    assert factors.factor.between(3, 6).all()
    loud = hazards(layer, torch.full((2, 256), 1e4), ["mmq"]).set_index(["hazard", "part"])["count"]
    assert loud["fp16 sum overflow", "gate"] > 0
