"""The dense branch beside the routed tail, each per token or batched: one set of bits, rows placed at will."""

import functools
import itertools

import pytest
import torch

import moe_lab as lab
from moe_lab.errors import LabError
from moe_lab.execution.branch import DenseBranch, run_halves
from moe_lab.layer import MoELayer
from tests.support.decode_layers import D, decode_layer, decode_rows, normed_layer

MODES = ("per_token", "batched")


normed = functools.cache(normed_layer)
blocks = functools.cache(decode_layer)
LAYERS = {
    "norms-affine": lambda: (normed(), "gemv"),
    "norms-blocks": lambda: (normed(("q8_0",) * 3), "gemv"),
    "gated": lambda: (blocks(), "gemv"),
    "reference": lambda: (normed(), "reference"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["norms-affine", "norms-blocks", "gated"])
def test_the_four_combinations_have_the_bits_of_the_whole_layer(name: str, dtype: torch.dtype) -> None:
    layer, arm = LAYERS[name]()
    x = decode_rows(7, dtype=dtype)
    want = layer(x, arm)
    for branch, tail in itertools.product(MODES, MODES):
        got = run_halves(layer, x, branch=branch, tail=tail, arm=arm)
        assert torch.equal(got.out, want.out), f"{branch} branch, {tail} tail"
        assert torch.equal(got.routing.ids, want.routing.ids)
        assert (got.branch_passes, got.tail_passes) == tuple(7 if mode == "per_token" else 1 for mode in (branch, tail))


@pytest.mark.parametrize("options", [{"stores": "fp32", "combine_order": "expert"}, {"routing": "device"}], ids=str)
def test_options_hold_in_both_halves(options: dict) -> None:
    layer, x, how = blocks(), decode_rows(3), lab.Options(**options)
    want = layer(x, "gemv", options=how).out
    for branch, tail in itertools.product(MODES, MODES):
        assert torch.equal(run_halves(layer, x, branch=branch, tail=tail, options=how).out, want)


@pytest.mark.parametrize("branch", MODES)
def test_the_output_row_is_chosen_apart_from_the_input_row(branch: str) -> None:
    layer, x, places = normed(), decode_rows(5), [9, 2, 0, 15, 4]
    plain = run_halves(layer, x, branch=branch)
    moved = run_halves(layer, x, branch=branch, tail="per_token", to=places)
    assert torch.equal(moved.out, plain.out)
    assert torch.equal(moved.branch, plain.branch)
    dense = DenseBranch(layer, 16, x.dtype)
    dense.rows.fill_(7)
    for t, to in enumerate(places):
        dense.token(x, t, to)
    assert torch.equal(dense.rows[places], plain.branch)
    others = [row for row in range(16) if row not in places]
    assert (dense.rows[others] == 7).all(), "a row that nobody asked for was written"
    assert dense.passes == 5


def test_rows_of_the_branch_do_not_depend_on_the_batch() -> None:
    layer, x = normed(), decode_rows(16)
    whole = layer.dense_branch(x, "gemv")
    for take in (1, 2, 3, 8, 15):
        assert torch.equal(layer.dense_branch(x[:take], "gemv"), whole[:take]), take


def test_a_micro_batch_beyond_the_buffer_is_refused_with_both_numbers() -> None:
    layer, x = normed(), decode_rows(9)
    for branch, tail in itertools.product(MODES, MODES):
        with pytest.raises(LabError, match="m=9 rows passes the dense branch's buffer of most_rows=8"):
            run_halves(layer, x, branch=branch, tail=tail, most_rows=8)
    dense = DenseBranch(layer, 8, x.dtype)
    with pytest.raises(LabError, match=r"m=9 .* most_rows=8"):
        dense.token(x[:8], 0, 8)
    with pytest.raises(LabError, match=r"m=9 .* most_rows=8"):
        dense.batch(x)


def test_other_refusals() -> None:
    layer, x = normed(), decode_rows(3)
    with pytest.raises(LabError, match=r"to = \[0, 1, 1\]; wanted m=3 different rows"):
        run_halves(layer, x, to=[0, 1, 1])
    with pytest.raises(LabError, match="different rows below most_rows=4"):
        run_halves(layer, x, to=[0, 1, 4], most_rows=4)
    from dataclasses import replace

    own = blocks()
    alone = MoELayer.from_tensors(replace(own.spec, shared=None), router=own.router,
                                  **{n: own.experts.stack.part(n) for n in ("gate", "up", "down")})  # fmt: skip
    for call in (lambda: run_halves(alone, x), lambda: alone.dense_branch(x), lambda: alone(x, branch=x)):
        with pytest.raises(LabError, match="no shared expert"):
            call()


@pytest.mark.wrong_types
def test_another_mode_and_other_rows_are_refused() -> None:
    with pytest.raises(LabError, match=r"branch is \(2, 256\) on cpu; wanted x's \(3, 256\)"):
        normed()(decode_rows(3), "gemv", branch=decode_rows(2))
    with pytest.raises(LabError, match="tail is 'chunked'; it must be one of per_token, batched"):
        run_halves(normed(), decode_rows(3), tail="chunked")


def test_no_rows() -> None:
    assert run_halves(normed(), decode_rows(0)).out.shape == (0, D)


def test_passes_carry_labels_that_a_profile_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], torch.profiler.record_function
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: seen.append(name) or real(name))
    run_halves(blocks(), decode_rows(2), branch="per_token", tail="batched")
    passes = [f"moe_lab: dense branch, token {t}" for t in range(2)]
    assert seen == [*passes, "moe_lab: routed tail, rows 0..2"]
