"""Every family against transformers' own module, fp32; and wrong formulas, each of which some case must notice."""

import pytest
import torch

from moe_lab.tolerances import tol

pytest.importorskip("transformers")

from moe_lab import hf
from tests.support.moe_modules import BY_NAME, CASES, Case, call, rows, token_ids
from tests.support.moe_mutants import MUTANTS

TOKENS = [0, 1, 10, 333]


def inputs(case: Case, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    return rows(tokens), token_ids(tokens) if case.hashed else None


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """max |a - b| relative to the largest b; 0 for no rows."""
    return float((a - b).abs().max() / b.abs().max()) if b.numel() else 0.0


def spread(ids: torch.Tensor, weights: torch.Tensor, width: int) -> torch.Tensor:
    """Weights by expert [T, R], so that slot order does not matter; an expert picked twice adds up."""
    return torch.zeros(len(ids), width, dtype=torch.float64).scatter_add_(1, ids.long(), weights.double())


def their_routing(block: torch.nn.Module, x: torch.Tensor, ids: torch.Tensor | None):
    """(ids, weights) that the module hands to its experts; Llama-4 hands over none, so its router's scores tell."""
    seen = []
    by_scores = type(block).__name__ == "Llama4TextMoe"
    if by_scores:
        hook = block.router.register_forward_hook(lambda m, args, out: seen.append(out[0].topk(m.top_k)[::-1]))
    else:
        hook = block.experts.register_forward_pre_hook(lambda m, args: seen.append(args[1:3]))
    try:
        call(block, x, ids)
    finally:
        hook.remove()
    return seen[0]


@pytest.mark.parametrize("tokens", TOKENS, ids=lambda t: f"T{t}")
@pytest.mark.parametrize("name", BY_NAME)
def test_the_layer_equals_the_module(name: str, tokens: int) -> None:
    case = BY_NAME[name]
    block, (x, ids) = case.build(), inputs(case, tokens)
    y = hf.from_module(block)(x, "reference", token_ids=ids)
    want = call(block, x.clone(), ids)
    assert y.out.shape == want.shape
    assert y.out.dtype == torch.float32
    assert distance(y.out, want) <= tol("reference/transformers")


@pytest.mark.parametrize("name", BY_NAME)
def test_picks_are_the_same_sets_with_the_same_weights(name: str) -> None:
    case = BY_NAME[name]
    block, (x, tokens) = case.build(), inputs(case, 333)
    layer = hf.from_module(block)
    ours, (ids, weights) = layer.route(x, tokens), their_routing(block, x, tokens)
    assert torch.equal(ours.ids.sort(-1).values.long(), ids.sort(-1).values)
    width = layer.spec.router.width
    assert distance(spread(ours.ids, ours.weights, width), spread(ids, weights, width)) <= tol("route/transformers")


def test_all_families_with_a_module_have_a_case() -> None:
    from moe_lab.families import FAMILIES

    assert {case.family for case in CASES} == {n for n, row in FAMILIES.items() if row.module is not None}
    assert len(CASES) == 29


def test_longcat_has_tokens_of_zero_experts_alone_and_of_real_ones() -> None:
    """Else its identity path would be compared with nothing."""
    layer = hf.from_module(BY_NAME["longcat_flash"].build())
    zero = (layer.route(rows(333)).ids >= layer.spec.num_experts).sum(-1)
    assert int(zero.min()) < int(zero.max())
    assert layer.spec.router.width == 12


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_formula_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noticed = []
    for case in CASES:
        block, (x, ids) = case.build(), inputs(case, 10)
        with monkeypatch.context() as patch:
            layer = hf.from_module(block)
            if MUTANTS[mutant](layer, patch):
                wrong = layer(x, "reference", token_ids=ids).out
                if not distance(wrong, call(block, x.clone(), ids)) <= 10 * tol("reference/transformers"):
                    noticed.append(case.name)
    assert noticed, f"no case notices: {mutant}"
