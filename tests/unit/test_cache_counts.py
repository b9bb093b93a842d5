"""The live cache and the simulator run the same policy objects: on a recorded trace they count the same, exactly."""

from pathlib import Path

import pandas as pd
import pytest

from moe_lab.simulate import simulate, steps
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.policy import POLICIES, LFUDecay, make_policy
from moe_lab.stream.source import ExpertSource
from moe_lab.trace import RoutingTrace
from tests.support.expert_files import write_experts

ROOT = Path(__file__).resolve().parents[2]
E, LAYERS = 32, (0, 5)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ExpertSource:
    """As many experts as the recorded model has a layer, a few bytes each; layer 5's are larger."""
    path = tmp_path_factory.mktemp("experts") / "x.bin"
    shapes = {0: ((1, 2), (1, 2), (2, 1)), 5: ((3, 5), (3, 5), (5, 7))}
    return write_experts(path, layers=LAYERS, experts=E, shapes=shapes.__getitem__)


@pytest.fixture(scope="module")
def recorded() -> RoutingTrace:
    """Eight tokens around a change of subject, two layers of the shipped trace."""
    whole = RoutingTrace.load(ROOT / "data" / "trace.parquet", tokens=(8188, 8196))
    return layers_of(whole, LAYERS)


def layers_of(trace: RoutingTrace, layers: tuple[int, ...]) -> RoutingTrace:
    ids, weights = ({n: getattr(trace, a)[:, trace.layers.index(n)] for n in layers} for a in ("ids", "weights"))
    return RoutingTrace.from_layers(ids, weights, num_experts=E, width=E)


def engine(source: ExpertSource, trace: RoutingTrace, step_tokens: int = 1, **how) -> pd.DataFrame:
    """(step, layer, hits, misses, bytes_read) as the cache's leases tell them."""
    rows = []
    with ExpertCache(**how) as cache:
        cache.bind(source, "cpu")
        for step, start in enumerate(range(0, trace.tokens, step_tokens)):
            for layer in trace.layers:
                picks = trace.layer(layer)[start : start + step_tokens].ravel().tolist()
                room = cache.slots_for(layer)
                wanted = sorted(set(picks))
                counts = [0, 0, 0]
                for wave in (wanted[i : i + room] for i in range(0, len(wanted), room)):
                    with cache.lease(source, layer, wave) as lease:
                        counts = [
                            a + b for a, b in zip(counts, (lease.hits, lease.misses, lease.bytes_read), strict=True)
                        ]
                rows.append((step, layer, *counts))
        assert cache.misses == sum(row[3] for row in rows)
    return pd.DataFrame(rows, columns=["step", "layer", "hits", "misses", "bytes_read"])


def same(engine_rows: pd.DataFrame, simulated: pd.DataFrame) -> bool:
    columns = ["step", "layer", "hits", "misses"]
    return engine_rows[columns].to_numpy().tolist() == simulated[columns].to_numpy().tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_at_every_capacity(source: ExpertSource, recorded: RoutingTrace, policy: str):
    one = layers_of(recorded, LAYERS[:1])
    for slots in range(1, E + 1):
        ran = engine(source, one, slots=slots, policy=policy, threads=1)
        assert same(ran, steps(one, slots, policy)), f"{slots} slots"


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_with_slots_split_by_layer(source: ExpertSource, recorded: RoutingTrace, policy: str):
    for slots in (2, 17, 33):
        ran = engine(source, recorded, slots=slots, policy=policy, per_layer=True, threads=2)
        assert same(ran, steps(recorded, slots, policy, per_layer=True)), f"{slots} slots"


@pytest.mark.parametrize("policy", POLICIES)
def test_batches_of_tokens_in_waves(source: ExpertSource, recorded: RoutingTrace, policy: str):
    ran = engine(source, recorded, step_tokens=5, slots=6, policy=policy, threads=2)
    assert same(ran, steps(recorded, 6, policy, step_tokens=5))


def test_the_bytes_and_the_layers_sums(source: ExpertSource, recorded: RoutingTrace):
    sizes = {layer: source.expert_nbytes(layer) for layer in LAYERS}
    ran = (
        engine(source, recorded, slots=12, policy="lfu_decay").groupby("layer")[["hits", "misses", "bytes_read"]].sum()
    )
    table = simulate(recorded, 12, ["lfu_decay"], expert_bytes=sizes).set_index("layer")
    assert ran.to_numpy().tolist() == table[["hits", "misses", "bytes_read"]].to_numpy().tolist()


@pytest.mark.parametrize(
    "policy",
    [make_policy("random_oldest", percent=60, seed=5), LFUDecay(half_life=4.0), LFUDecay],
    ids=["name-with-options", "object", "class"],
)
def test_a_policy_with_options_of_its_own(source: ExpertSource, recorded: RoutingTrace, policy: object):
    expected = steps(recorded, 11, policy)  # before the cache uses the object itself
    assert same(engine(source, recorded, slots=11, policy=policy), expected)


def test_a_drawn_victim_depends_on_the_seed(recorded: RoutingTrace):
    seeded = [
        steps(recorded, 20, make_policy("random_oldest", percent=100, seed=seed)).misses.tolist() for seed in (0, 0, 1)
    ]
    assert seeded[0] == seeded[1] != seeded[2]
