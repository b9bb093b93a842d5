"""How close a token came to other picks: dyadic scores, so that every difference is exact."""

import math

import numpy as np
import pytest
import torch

import moe_lab as lab
from moe_lab.errors import LabError
from moe_lab.routing import choice_margin

NAN, INF = float("nan"), float("inf")


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("settings", "row", "bias", "want"),
    [
        ({"score": "none", "weights_from": "softmax_topk"}, [1.0, 4.0, 2.5, -1.0], None, 1.5),
        ({"score": "none", "weights_from": "softmax_topk"}, [2.0, 4.0, 2.0, -1.0], None, 0.0),
        ({"score": "sigmoid"}, [0.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.25, 0.125], 0.125),
        ({"score": "sigmoid"}, [0.0, 0.0, 0.0, 0.0], None, 0.0),
        # the best group is {2, 3}; the next expert inside the kept groups is none: the others are filled
        ({"score": "sigmoid", "n_group": 2, "topk_group": 1}, [0.0] * 4, [0.5, 0.0, 0.5, 0.25], INF),
        (
            {"score": "sigmoid", "n_group": 2, "topk_group": 1, "group_fill": 0.0},
            [0.0] * 4,
            [0.5, 0.0, 0.5, 0.25],
            0.75,
        ),
        ({"weights_from": "sparsemixer", "score": "none"}, [1.0, 3.0, 2.0, 0.5], None, 1.0),
        ({"score": "none", "weights_from": "softmax_topk"}, [NAN, 1.0, NAN, NAN], None, 0.0),
        ({"score": "none", "weights_from": "softmax_topk"}, [NAN, 1.0, 2.0, NAN], None, INF),
        ({"score": "none", "weights_from": "softmax_topk"}, [INF, INF, INF, 0.0], None, 0.0),
        ({"score": "none", "weights_from": "softmax_topk", "temperature": 2.0}, [8.0, 4.0, 2.0, 0.0], None, 1.0),
    ],
    ids=[
        "logits", "tie", "bias", "flat", "groups", "groups-filled", "sparsemixer", "nan", "nan-next", "inf",
        "temperature",
    ],
)  # fmt: skip
def test_the_margin_is_the_last_pick_minus_the_next(settings, row, bias, want) -> None:
    spec = lab.RouterSpec(4, 2, **settings)
    vector = None if bias is None else torch.tensor(bias)
    assert choice_margin(logits(row), spec, correction_bias=vector).tolist() == [want]


def test_softmax_margin_is_in_probabilities() -> None:
    (margin,) = choice_margin(logits([math.log(4), math.log(2), 0.0, 0.0]).double(), lab.RouterSpec(4, 1)).tolist()
    assert margin == np.float32(0.25)


def test_nothing_further_to_pick_and_nothing_ranked() -> None:
    assert choice_margin(logits([1.0, 2.0]), lab.RouterSpec(2, 2)).tolist() == [INF]
    assert choice_margin(logits([1.0, 2.0]), lab.RouterSpec(2, 1, hash_routing=True)).isnan().all()
    assert choice_margin(torch.zeros(0, 4), lab.RouterSpec(4, 2)).shape == (0,)
    with pytest.raises(LabError, match="R=4"):
        choice_margin(torch.zeros(1, 3), lab.RouterSpec(4, 2))


def test_a_lead_smaller_than_the_margin_changes_no_pick() -> None:
    spec = lab.RouterSpec(16, 4, score="none", weights_from="softmax_topk")
    z = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    margin, picks = choice_margin(z, spec), lab.route(z, spec).ids.long()
    outsider = z.scatter(1, picks, -INF).argmax(1, keepdim=True)
    for factor, same in ((0.99, True), (1.01, False)):
        moved = z.scatter_add(1, outsider, (margin * factor)[:, None])
        kept = (lab.route(moved, spec).ids.long().sort().values == picks.sort().values).all(1)
        assert bool(kept.all()) if same else not bool(kept.any())
