"""Questions to layers: prediction one layer ahead, and flips between two precisions of a router."""

import numpy as np
import pandas as pd
import pytest
import torch

import moe_lab as lab
from moe_lab.activations import Activations, Inputs
from moe_lab.analysis.prediction import _resident
from moe_lab.analysis.scores import ranking
from moe_lab.spec import MoESpec

A = lab.analysis
D, E, K, T = 16, 8, 2, 60


def layer_with(
    router: torch.Tensor, number: int = 0, bias: torch.Tensor | None = None, **settings: object
) -> lab.MoELayer:
    """A layer of which only the router matters."""
    spec = MoESpec(
        lab.RouterSpec(len(router), K, **settings),
        d_model=router.shape[1],
        d_expert=4,
        correction_bias=bias is not None,
    )
    experts = {"gate": (4, D), "up": (4, D), "down": (D, 4)}
    weights = {name: torch.zeros(len(router), *shape) for name, shape in experts.items()}
    biases = None if bias is None else {"correction": bias}
    return lab.MoELayer.from_tensors(spec, router=router, number=number, biases=biases, **weights)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(*layers: torch.Tensor) -> Activations:
    return Activations(np.stack([x.numpy().astype(np.float16) for x in layers]), tuple(range(len(layers))))


def recall(df: pd.DataFrame, predictor: str) -> list[float]:
    return df[df["predictor"] == predictor]["recall"].tolist()


def test_same_input_is_predicted_perfectly() -> None:
    x, router = noise(T, D), noise(E, D, seed=1)
    df = A.next_layer({0: layer_with(noise(E, D)), 1: layer_with(router, 1)}, rows(x, x))
    assert recall(df, "next router") == [1, 1, 1]
    own = df[df["predictor"] == "next router"]
    assert own["precision"].tolist() == pytest.approx([1, K / (K + 1), K / (K + 2)])
    assert own["miss_coverage"].tolist() == [1, 1, 1]
    assert own["read_precision"].iloc[0] == 1


def test_unrelated_input_is_predicted_as_by_chance() -> None:
    layers = {n: layer_with(noise(E, D, seed=n), n) for n in range(2)}
    df = A.next_layer(layers, rows(noise(4000, D, seed=7), noise(4000, D, seed=8)), [K])
    assert recall(df, "next router")[0] == pytest.approx(K / E, abs=0.05)


def test_controls_by_hand() -> None:
    """Every token picks experts 0 and 1, the last one 2 and 3."""
    x = torch.zeros(T, D)
    x[:, :2], x[-1] = torch.tensor([2.0, 1.0]), 0
    x[-1, 2:4] = torch.tensor([2.0, 1.0])
    df = A.next_layer({n: layer_with(torch.eye(E, D), n) for n in range(2)}, rows(x, x), [K], cache_slots=K)
    assert recall(df, "previous token") == pytest.approx([(T - 2) / T])
    assert recall(df, "popularity") == pytest.approx([(T - 1) / T])
    popular = df[df["predictor"] == "popularity"].iloc[0]
    assert popular["would_read"] == pytest.approx(K / T)  # the first token finds an empty cache, the others all of it
    assert popular["read_precision"] == 1
    assert popular["miss_coverage"] == 0.5
    assert np.isnan(df[df["predictor"] == "previous token"]["read_precision"].iloc[0])


def test_previous_token_names_the_newest_first() -> None:
    """Tokens pick {0, 1}, {2, 3}, {0, 1}: two guesses at the third are {2, 3}, four hold its picks."""
    x = torch.zeros(3, D)
    x[0, 0], x[0, 1], x[1, 2], x[1, 3], x[2, 0], x[2, 1] = 2, 1, 2, 1, 2, 1
    df = A.next_layer({n: layer_with(torch.eye(E, D), n) for n in range(2)}, rows(x, x), [2, 4])
    assert recall(df, "previous token") == pytest.approx([0, 2 / 6])


ROUTERS = {
    "softmax": ({}, False),
    "sigmoid-bias": ({"score": "sigmoid"}, True),
    "groups": ({"score": "sigmoid", "n_group": 4, "topk_group": 2}, False),
    "sparsemixer": ({"score": "none", "weights_from": "sparsemixer"}, False),
    "normalised-scaled": ({"normalize": True, "scale": 2.5}, False),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_ranking_begins_with_the_layers_own_picks(name: str) -> None:
    settings, biased = ROUTERS[name]
    layer = layer_with(noise(E, D, seed=2), bias=noise(E, seed=3) if biased else None, **settings)
    x = noise(T, D)
    wide = ranking(layer, x, 2 * K)
    assert torch.equal(wide[:, :K], layer.route(x).ids)
    assert all(len(set(row)) == 2 * K for row in wide.tolist())


@pytest.mark.parametrize("slots", [2, 3, 5, 8])
def test_the_cache_is_the_simulators(slots: int) -> None:
    ids = np.argsort(noise(200, E).numpy(), axis=1)[:, :K]
    picked = np.zeros((200, E), bool)
    np.put_along_axis(picked, ids, True, axis=1)
    misses = int((picked & ~_resident(picked, slots)).sum())
    assert misses == lab.simulate(ids[:, None], slots, ["lru"])["misses"].item()


def test_layers_without_recorded_rows_are_passed_over() -> None:
    x = noise(10, D)
    layers = {n: layer_with(noise(E, D, seed=n), n) for n in (0, 1, 2)}
    df = A.next_layer(layers, Activations(rows(x, x).x, (0, 2)), [K])
    assert df[["layer", "next_layer"]].drop_duplicates().to_numpy().tolist() == [[0, 2]]


def two(**settings: object) -> dict[int, lab.MoELayer]:
    return {n: layer_with(noise(E, D, seed=n), n, **settings) for n in range(2)}


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("ask", "error", "says"),
    [
        (lambda: A.next_layer(two(), Inputs("no/model.gguf", D, 5)), lab.LabError, "synthetic"),
        (lambda: A.router_flips(two(), Inputs("no/model.gguf", D, 5)), lab.LabError, "synthetic"),
        (lambda: A.next_layer(two(), noise(5, D)), lab.LabTypeError, "Tensor"),
        (lambda: A.next_layer({0: two()[0]}, rows(noise(5, D))), lab.LabError, "two MoE layers"),
        (lambda: A.next_layer(two(), rows(noise(5, D), noise(5, D)), [0]), lab.LabError, "1..8"),
        (lambda: A.next_layer(two(), rows(noise(5, D), noise(5, D)), [9]), lab.LabError, "1..8"),
        (lambda: A.next_layer(two(), rows(noise(5, D), noise(5, D)), cache_slots=1), lab.LabError, "cache_slots=1"),
    ],
    ids=["synthetic", "synthetic-flips", "tensor", "one-layer", "reads-0", "reads-over-R", "slots"],
)
def test_what_cannot_be_predicted_is_refused(ask, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        ask()


A_LOGITS = torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.9, 0.0]])
B_LOGITS = torch.tensor([[3.0, 2.0, 1.0, 0.0], [2.0, 3.0, 1.0, 0.0], [3.0, 1.9, 2.0, 0.0]])


def test_a_flip_is_another_set_and_not_another_order() -> None:
    df = A.flips(A_LOGITS, B_LOGITS, lab.RouterSpec(4, 2, score="none", weights_from="softmax_topk"))
    assert df["flipped"].tolist() == [False, False, True]
    assert df["changed"].tolist() == [0, 0, 1]
    assert df["margin"].tolist() == pytest.approx([1, 1, 0.1])
    assert df["weight_moved"].tolist() == pytest.approx([0, 0, 1 / (1 + np.e)])


def test_margin_is_the_choice_score_with_its_bias() -> None:
    bias = torch.tensor([0.0, 0.0, 0.5, 0.0])
    df = A.flips(A_LOGITS, A_LOGITS, lab.RouterSpec(4, 2, score="sigmoid"), correction_bias=bias)
    scores = np.sort(1 / (1 + np.exp(-A_LOGITS.double().numpy())) + bias.numpy(), axis=1)
    assert df["margin"].tolist() == pytest.approx((scores[:, -2] - scores[:, -3]).tolist())
    assert not df["flipped"].any()


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_broken_rows_stay_rows(broken: float) -> None:
    worse = A_LOGITS.clone()
    worse[1] = broken
    df = A.flips(worse, worse, lab.RouterSpec(4, 2))
    assert len(df) == 3
    assert not df["flipped"].any()
    assert df["margin"].iloc[1] == 0


@pytest.mark.wrong_types
def test_flips_refuse_tables_and_other_shapes() -> None:
    with pytest.raises(lab.LabError, match="hash router"):
        A.flips(A_LOGITS, B_LOGITS, lab.RouterSpec(4, 2, hash_routing=True))
    with pytest.raises(lab.LabError, match="equal shapes"):
        A.flips(A_LOGITS, B_LOGITS[:2], lab.RouterSpec(4, 2))


def test_router_flips_names_layers_and_variants_and_finds_a_planted_flip() -> None:
    def reverse(layer: lab.MoELayer, x: torch.Tensor) -> torch.Tensor:
        return -A.layer_logits(layer, x)

    x = noise(40, 32)
    layers = {
        n: lab.MoELayer.from_tensors(
            MoESpec(lab.RouterSpec(E, K), 32, 4), router=noise(E, 32, seed=n), number=n,
            gate=torch.zeros(E, 4, 32), up=torch.zeros(E, 4, 32), down=torch.zeros(E, 32, 4),
        )
        for n in (0, 1)
    }  # fmt: skip
    df = A.router_flips(layers, rows(x, x), {**A.ROUTER_VARIANTS, "reversed": reverse})
    assert df.groupby(["layer", "pair"]).size().unique().tolist() == [40]
    rate = df.groupby("pair")["flipped"].mean()
    assert rate["reversed"] == 1
    assert rate.drop("reversed").max() < 0.2
    flipped = df[df["flipped"] & (df["pair"] == "bf16 result")]
    assert (flipped["margin"] < 0.02).all()


def test_flip_rate_counts_every_token_once() -> None:
    margin = np.concatenate([np.zeros(5), np.geomspace(1e-6, 0.5, 95), [np.inf, np.nan]])
    df = pd.DataFrame({"margin": margin, "flipped": margin < 1e-3})
    rate = A.flip_rate(df)
    assert rate["tokens"].sum() == 100
    assert rate["flipped"].sum() == (margin < 1e-3).sum()
    assert rate["margin_from"].iloc[0] == 0
    assert rate["tokens"].iloc[0] >= 20
    assert rate["flip_rate"].tolist() == pytest.approx((rate["flipped"] / rate["tokens"]).tolist())
    own = A.flip_rate(df, [0.0, 0.01, 1.0])
    assert own["margin_to"].tolist() == [0.01, 1.0]
