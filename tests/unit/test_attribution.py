"""Shapley shares of known games, and the attribution table made of them."""

import numpy as np
import pytest
import torch

from moe_lab.parity.attribution import COLUMNS, Choice, attribute, shapley

WORTH = {"a": 1.0, "b": 2.0, "c": -0.5, "d": 0.0, "e": 4.0}


def additive(subset: frozenset[str]) -> np.ndarray:
    return np.array([sum(WORTH[p] for p in subset), len(subset)])


def glove(subset: frozenset[str]) -> np.ndarray:
    """One left glove (a), two right ones (b, c): a pair is worth 1. Shares 2/3, 1/6, 1/6."""
    return np.array([float("a" in subset and bool(subset & {"b", "c"}))])


def crowded(subset: frozenset[str]) -> np.ndarray:
    """Everyone's worth counts more, and ever more, the more there are. (What grows in pairs alone, an order and its
    reverse would give exactly.)"""
    return np.array([sum(WORTH.get(p, 1.0) for p in subset) * (1 + len(subset)) ** 2])


def test_what_adds_up_is_shared_by_worth() -> None:
    found = shapley(additive, list(WORTH))
    assert np.allclose(found.share, [[v, 1.0] for v in WORTH.values()])
    assert found.evaluated == 32
    assert found.method == "exact, 32 subsets"
    assert not found.error.any()


def test_the_glove_game() -> None:
    assert np.allclose(shapley(glove, "abc").share[:, 0], [2 / 3, 1 / 6, 1 / 6])


def test_sampled_shares_add_up_and_lie_within_their_error_of_the_exact_ones() -> None:
    players = list("abcdefgh")
    exact, sampled = shapley(crowded, players), shapley(crowded, players, most=150, seed=3)
    assert sampled.evaluated <= 150
    assert "orders" in sampled.method
    assert np.isclose(sampled.share.sum(), crowded(frozenset(players))[0])
    assert np.all(np.abs(sampled.share - exact.share) <= 4 * sampled.error + 1e-9)
    assert sampled.error.max() > 0
    again = shapley(crowded, players, most=150, seed=3)
    assert np.array_equal(again.share, sampled.share)


def test_each_subset_is_asked_for_once() -> None:
    asked: list[frozenset[str]] = []

    def value(subset: frozenset[str]) -> np.ndarray:
        asked.append(subset)
        return additive(subset)

    shapley(value, "abcd", most=4096)
    assert len(asked) == len(set(asked)) == 16


@pytest.fixture
def choices() -> list[Choice]:
    return [Choice("a", "one", "0", "3"), Choice("b", "two", "same", "same"), Choice("c", "three", "0", "4")]


def moved(letters: frozenset[str]) -> torch.Tensor:
    return torch.tensor([10.0, 3.0 * ("a" in letters), 4.0 * ("c" in letters)])


def test_table_reads_distance_and_error(choices: list[Choice]) -> None:
    exact = torch.tensor([10.0, 0.0, 4.0])
    df = attribute(moved, choices, exact)
    assert tuple(df.columns) == COLUMNS
    by = df.set_index("choice")
    assert by.share.tolist() == pytest.approx([0.09, 0.0, 0.16])
    assert by["first"].tolist() == by["last"].tolist() == pytest.approx([0.09, 0.0, 0.16])
    assert df.attrs["nmse_ab"] == pytest.approx(0.25)
    # against `exact` a's third value is wrong and c cures it, while a adds an error of its own
    assert by.error_share.tolist() == pytest.approx([9 / 116, 0.0, -16 / 116])
    assert by.error_share.sum() == pytest.approx(df.attrs["error_b"] - df.attrs["error_a"])
    assert by.error_first["b"] == pytest.approx(df.attrs["error_a"])


def test_choices_that_do_not_differ_are_not_run(choices: list[Choice]) -> None:
    asked: set[frozenset[str]] = set()

    def run(letters: frozenset[str]) -> torch.Tensor:
        assert letters not in asked, "an output was computed twice"
        asked.add(letters)
        return moved(letters)

    attribute(run, choices, torch.tensor([10.0, 0.0, 0.0]))
    assert asked == {frozenset(), frozenset("a"), frozenset("c"), frozenset("ac")}


def test_sides_without_a_difference_share_nothing() -> None:
    df = attribute(moved, [Choice("b", "two", "x", "x")], torch.ones(3))
    assert df.attrs["method"] == "no choice differs"
    assert df.loc[0, ["first", "last", "share"]].tolist() == [0.0, 0.0, 0.0]
