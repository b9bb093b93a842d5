"""`lab.bench`: who is right and timed, who is seen through, and what is recorded of the others."""

import functools
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import moe_lab as lab
from moe_lab.bench import clock as clocks
from moe_lab.bench.cell import Cell, Settings
from moe_lab.bench.harness import with_peers
from moe_lab.bench.peers import peer_rows, recorded
from moe_lab.bench.weights import SERVED, make_layer, unfit
from moe_lab.bench.workloads import SHAPES, LayerShape
from moe_lab.errors import LabError, LabTypeError
from moe_lab.layer import MoELayer
from moe_lab.routing import Routing
from moe_lab.runs import Case, Record, Run, Spread, Status, diff
from moe_lab.runs.columns import COLUMNS
from tests.support import bench_arms as arms

TINY = LayerShape("tiny", 64, 96, 6, 2)
QUICK = Settings(cell_ms=1.0, least=5, most=5, states=("warm",))


@functools.cache
def tiny(format: str = "q8_0") -> MoELayer:
    return make_layer(TINY, format)


def rows(tokens: int = 20) -> torch.Tensor:
    return torch.randn(tokens, TINY.d_model, generator=torch.Generator().manual_seed(tokens))


def one(arm: object, **more) -> pd.Series:
    """The record of one arm, an honest one measured after it."""
    frame = lab.bench(make_layer(TINY, "q8_0"), rows(), [arm, arms.Honest()], settings=QUICK, **more)
    assert frame.status.iloc[-1] == "PASSED"
    assert len(frame) == 2
    return frame.iloc[0]


def test_right_arms_are_timed_cold_and_warm() -> None:
    settings = replace(QUICK, states=("cold", "warm"))
    frame = lab.bench(tiny(), rows(), ["reference", "gemv", arms.Honest(), "auto"], settings=settings)
    assert list(frame.columns) == [*COLUMNS, "source", "device"]
    assert set(frame.status) == {"PASSED"}
    assert list(zip(frame.arm, frame.state, strict=True)) == [
        (arm, state) for arm in ("reference", "gemv", "honest", "auto (gemv)") for state in ("cold", "warm")
    ]
    assert (frame.n == 5).all()
    assert (frame.p50 > 0).all()
    assert (frame.floor.notna() == (frame.state == "cold")).all()  # nothing is known of a cache's bandwidth
    assert (frame.predicted >= frame.floor.fillna(0)).all()
    assert frame.method.str.startswith("host clock").all()
    assert set(frame.tokens) == {20}
    assert frame.error.max() <= lab.tolerances.tol("bench/layer")


SEEN_THROUGH = {
    "LastOutput": "cached",
    "ByAddress": "cached",
    "ContiguousOnly": "right for contiguous rows only; rows with gaps",
    "ChangesRows": "changed its input x",
    "ChangesWeights": "changed the weights",
    "ChangesSchedule": "changed its input schedule.weight",
    "LeavesRows": "left 1 of 40 rows of y unwritten or not finite",
    "WritesElsewhere": "not its own",
    "ByFirstRow": "when that row alone had changed: NMSE",
    "SlowAndWrong": "NMSE 0.01 is above 0.0005",
    "OneBadRow": "bound",
    "LazyLater": "right when checked, but not while timed",
}


@pytest.mark.parametrize("name", SEEN_THROUGH)
def test_a_wrong_arm_is_incorrect_and_has_no_speed(name: str) -> None:
    row = one(getattr(arms, name)())
    assert row.status == "INCORRECT"
    assert SEEN_THROUGH[name] in row.reason
    assert row.error_measure
    assert row[["p20", "p50", "p80", "p95", "iqr", "floor", "predicted"]].isna().all()


def test_one_bad_row_of_many_is_seen() -> None:
    frame = lab.bench(tiny(), rows(300), [arms.OneBadRow()], settings=QUICK)
    assert "worst row" in frame.reason[0]


@pytest.mark.parametrize(
    ("arm", "status", "reason"),
    [
        (arms.Raises(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")), "OOM", "2 GiB"),
        (arms.Raises(MemoryError()), "OOM", "MemoryError"),
        (arms.Raises(RuntimeError("DefaultCPUAllocator: can't allocate memory")), "OOM", "can't allocate"),
        (arms.Raises(KeyError("q9_k")), "ERROR", "KeyError: 'q9_k'"),
        (arms.Raises(torch.OutOfMemoryError("out of memory"), after=9), "OOM", "out of memory"),
    ],
    ids=["cuda", "host", "torch on the CPU", "another", "only while timed"],
)
def test_an_arm_that_fails_is_recorded_and_the_harness_goes_on(arm: object, status: str, reason: str) -> None:
    row = one(arm)
    assert row.status == status
    assert reason in row.reason
    assert np.isnan(row.p50)
    assert np.isnan(row.error)


def test_inputs_are_fresh_in_every_call() -> None:
    arm = arms.Records()
    frame = lab.bench(tiny(), rows(4), [arm], settings=QUICK)
    assert frame.status[0] == "PASSED"
    whole = [x for x in arm.seen if len(x) == 4]
    assert len(whole) >= 5 + 3
    timed = whole[-6:]
    assert not any(torch.equal(a, b) for i, a in enumerate(timed) for b in timed[:i])


CHECKS = 1 + 1 + 3 + 3  # fresh rows, the same storage, single rows, layouts


@pytest.mark.parametrize(("tokens", "dtype"), [(20, torch.float32), (1, torch.bfloat16)], ids=["batch", "one row"])
def test_no_values_come_twice_while_timed(tokens: int, dtype: torch.dtype) -> None:
    """Neither in the other state, nor in another benchmark of the same arm, nor where bf16 has few factors to draw."""
    arm, layer, x = arms.ByAllRows(), tiny(), rows(tokens).to(dtype)
    checks = CHECKS if tokens > 1 else 1 + 1 + 1
    for _ in range(2):
        arm.calls, arm.hits = 0, []
        frame = lab.bench(layer, x, [arm], settings=replace(QUICK, least=60, most=60, states=("cold", "warm")))
        assert set(frame.status) == {"PASSED"}
        assert arm.calls >= checks + 2 * 61
        assert not [call for call in arm.hits if call >= checks]


def test_an_arm_wrong_in_another_layout_shows_that_error() -> None:
    assert one(arms.ContiguousOnly()).error > lab.tolerances.tol("bench/layer")


def test_an_own_arm_is_named_as_it_is() -> None:
    class Returns(arms.Honest):
        name = "returns"

        def experts(self, x, stack, schedule, groups, y, ctx):
            return x

    row = one(Returns())
    assert row.status == "ERROR"
    assert "arm 'returns': experts returned a Tensor" in row.reason


def test_picks_are_the_routers_or_those_given() -> None:
    x, seen = rows(3), []

    class Counts(arms.Honest):
        name = "counts"

        def experts(self, x, stack, schedule, groups, y, ctx) -> None:
            seen.append({g.expert for g in groups})
            super().experts(x, stack, schedule, groups, y, ctx)

    routing = Routing(torch.tensor([[5, 4]] * 3), torch.full((3, 2), 0.5))
    frame = lab.bench(tiny(), x, [Counts()], routing=routing, settings=QUICK)
    assert frame.status[0] == "PASSED"
    assert {frozenset(s) for s in seen} == {frozenset({4, 5})}
    assert frame.workload[0] == "given rows"


def test_several_token_counts_walk_through_the_rows_given() -> None:
    frame = lab.bench(tiny(), rows(12), ["reference"], tokens=[1, 6], settings=replace(QUICK, states=("cold",)))
    assert list(frame.tokens) == [1, 6]
    assert list(frame.method) == [f"host clock, caches flushed, rotation of {r}" for r in (3, 2)]


def test_a_streamed_layer_has_no_cold_or_warm() -> None:
    with lab.open(lab.sample()) as ckpt, lab.ExpertCache(slots=8) as cache:
        frame = lab.bench(ckpt.layer(0, cache=cache), torch.randn(4, 256), ["gemv"], settings=QUICK)
    assert list(frame.status) == ["PASSED"]
    assert list(frame.state) == [""]
    assert frame.shared_arm[0]


@pytest.mark.wrong_types  # for its time: the checks are the tests' own and take four fifths of it
def test_a_laptop_compares_its_own_arm_in_seconds() -> None:
    begin = time.process_time()
    with lab.open(lab.sample()) as ckpt:
        x = lab.Activations.load(lab.sample().with_name("activations.npz")).layer(3)[:8]
        frame = lab.bench(ckpt.layer(3), x, ["reference", "gemv", arms.Honest()])
    assert set(frame.status) == {"PASSED"}
    assert len(frame) == 6
    assert time.process_time() - begin < 10


def test_outputs_in_one_storage_are_seen() -> None:
    class OneBuffer(MoELayer):
        kept = torch.empty(0)

        def __call__(self, x, arm="auto", **more):
            y = super().__call__(x, arm, **more)
            if self.kept.shape != y.out.shape:
                self.kept = torch.empty_like(y.out)
            return replace(y, out=self.kept.copy_(y.out))

    layer = make_layer(TINY, "q8_0")
    layer.__class__ = OneBuffer
    frame = lab.bench(layer, rows(), ["reference"], settings=QUICK)
    assert list(frame.status) == ["INCORRECT"]
    assert "results share storage" in frame.reason[0]


def test_weights_without_values_are_an_error_of_the_layer_not_of_the_arm() -> None:
    layer = make_layer(TINY, "f32")
    layer.experts.stack.down.data.view(torch.float32)[:, 0, 0] = float("nan")
    frame = lab.bench(layer, rows(4), ["reference"], settings=QUICK)
    assert list(frame.status) == ["ERROR"]
    assert "the reference itself gives values that are not finite" in frame.reason[0]


@pytest.mark.parametrize(("l2", "calls", "layers"), [(0, 3, 1), (100_000, 15, 5)], ids=["large", "small"])
def test_a_cold_rotation_touches_more_than_the_l2(monkeypatch, l2: int, calls: int, layers: int) -> None:
    """Two experts of tiny in q8_0 are 39,168 bytes: five copies of the layer, three pairs of rows each."""
    monkeypatch.setattr(clocks, "l2_bytes", lambda device: l2 * 3.8)
    routing = [Routing(torch.tensor([[2 * i, 2 * i + 1]]), torch.ones(1, 2)) for i in range(3)]
    cell = Cell(tiny(), torch.randn(3, 1, 64), routing, Case(workload="w"))
    assert cell.weight_bytes == 2 * 3 * 64 * 96 * 34 / 32
    rotation = clocks._calls(cell, "cold")
    assert len(rotation) == calls
    addresses = {layer.experts.stack.up.data.data_ptr() for layer, _, _ in rotation}
    assert len(addresses) == layers
    assert len({(id(layer), int(r.ids[0, 0])) for layer, _, r in rotation}) == calls
    assert l2 == 0 or calls * cell.weight_bytes > 1.5 * l2 * 3.8
    first, last = rotation[0][0], rotation[-1][0]
    assert torch.equal(first.experts.stack.up.data, last.experts.stack.up.data)
    assert len({(id(layer), int(r.ids[0, 0])) for layer, _, r in clocks._calls(cell, "warm")}) == 1


def test_shapes_say_which_format_they_cannot_have() -> None:
    shapes = ["gpt-oss-120b-like", "gemma4-26b-a4b-like"]
    formats = ["q2_k+q3_k", "q2_k+q8_0", "q8_0"]
    frame = lab.bench(shapes, arms=["gemv"], formats=formats, tokens=1, device="cpu", settings=QUICK)
    status = {(m.split("-")[0], f): (s, r) for m, f, s, r in frame[["model", "format", "status", "reason"]].to_numpy()}
    assert {case: s for case, (s, _) in status.items()} == {
        ("gpt", "q2_k+q3_k"): "UNSUPPORTED", ("gpt", "q2_k+q8_0"): "UNSUPPORTED", ("gpt", "q8_0"): "PASSED",
        ("gemma4", "q2_k+q3_k"): "UNSUPPORTED", ("gemma4", "q2_k+q8_0"): "PASSED", ("gemma4", "q8_0"): "PASSED",
    }  # fmt: skip
    assert "gate and up rows of 352" in status["gpt", "q2_k+q8_0"][1]
    assert "down rows of 96 values are no whole blocks of 256, which q3_k needs" in status["gemma4", "q2_k+q3_k"][1]
    assert (frame.model.str.endswith(" 1/8")).all()


def test_an_arm_without_the_format_is_unsupported() -> None:
    frame = lab.bench(tiny("f32"), rows(), ["grouped", "reference"], settings=QUICK)
    assert list(frame.status) == ["UNSUPPORTED", "PASSED"]
    assert "f32" in frame.reason[0]


def test_what_the_budget_leaves_out_is_named() -> None:
    with pytest.warns(UserWarning, match="left out 1 measurements, from tiny uniform T=8 in q8_0, reference on"):
        frame = lab.bench(
            TINY, arms=["reference"], formats=["q8_0", "q2_k"], tokens=[8], settings=replace(QUICK, budget_s=1e-9)
        )
    assert frame.attrs["left_out"] == ["tiny uniform T=8 in q8_0, reference"]
    assert list(frame.status) == ["UNSUPPORTED"]


def test_a_saved_run_says_what_it_was_measured_with(tmp_path) -> None:
    frame = lab.bench(tiny(), rows(4), ["reference"], save=tmp_path, settings=QUICK, model="mine", name="noise")
    run = Run.load(frame.attrs["saved"])
    assert run.environment["roof_read_gb_per_s"]
    assert run.options["arms"] == ["reference"]
    assert run.records[0].case.model == "mine"
    assert run.records[0].case.workload == "noise"
    assert len(run.records[0].spread.samples) == 5
    assert diff(run, run).verdict == "same"


def test_recorded_peers_stand_beside_the_same_case_alone() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    case = Case(
        workload="zipf", model=shape.name, d_model=2048, d_expert=768, experts=128, top_k=8, tokens=8, state="cold"
    )
    record = Record(
        what="layer", case=case, arm="gemv", format="q2_k+q3_k", backend="cuda", status=Status.PASSED, error=0.0,
        spread=Spread.of([0.1]), error_measure="none", method="graph-replay",
    )  # fmt: skip
    run = Run("bench", [record])
    frame = with_peers(run.frame.assign(source="measured", device="here"), run)
    assert list(frame.arm) == ["gemv", "ggml-cuda"]
    theirs = frame.iloc[1]
    assert (theirs.source, theirs.device, theirs.unit) == ("recorded", "NVIDIA H200", "ms")
    assert theirs.p50 == pytest.approx(0.139, abs=5e-4)  # 139 us in the published table
    assert theirs.floor < theirs.p50
    assert frame.dtypes.to_dict() == run.frame.assign(source="", device="").dtypes.to_dict()
    assert not peer_rows([(replace(case, d_model=256), "q2_k+q3_k")])
    assert not peer_rows([(replace(case, model="qwen3-30b-a3b 1/8"), "q2_k+q3_k")])
    mxfp4 = peer_rows([(replace(case, workload="uniform"), "mxfp4")])
    assert {row["format"] for row in mxfp4} == {"mxfp4", "mxfp4_oss"}


def test_every_recorded_peer_ran_a_workload_of_ours() -> None:
    assert len(recorded()) == 1294
    assert {row["model"] for row in recorded()} <= set(SHAPES)
    assert all(float(row["us"]) > 0 for row in recorded())


@pytest.mark.parametrize("format", SERVED)
@pytest.mark.parametrize("name", ["v4.1-like", "gpt-oss-120b-like"])
def test_made_layers_are_finite_and_their_experts_differ(name: str, format: str) -> None:
    shape = replace(SHAPES[name].shrunk(8), experts=6)
    if unfit(shape, format):
        with pytest.raises(LabError, match="no whole blocks"):
            make_layer(shape, format)
        return
    stack = make_layer(shape, format, seed=3).experts.stack
    for q in stack.parts.values():
        w = q.dequantize()
        assert w.isfinite().all()
        assert 0.5 < float(w.double().std() * w.shape[-1] ** 0.5) < 2
        assert not torch.equal(w[0], w[1])


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: lab.bench(tiny(), rows(), ["gemv", "gemv"]), "'gemv' was named twice"),
        (lambda: lab.bench(tiny(), rows(), ["magic"]), "no arm is called 'magic'"),
        (lambda: lab.bench(tiny(), rows(), []), "at least one"),
        (lambda: lab.bench(tiny(), rows(), "gemv"), "wanted a list"),
        (lambda: lab.bench(tiny(), rows()[:, :9], ["gemv"]), r"shape \(20, 9\)"),
        (lambda: lab.bench(tiny(), rows(), tokens=[21]), "T=21 tokens asked, but x has 20"),
        (lambda: lab.bench(tiny(), rows(), tokens=0), "1 or more"),
        (lambda: lab.bench(tiny(), formats=["q8_0"]), "formats belong to shapes"),
        (lambda: lab.bench(TINY, rows()), "x and routing belong to a layer"),
        (lambda: lab.bench([TINY, tiny()]), "not both at once"),
        (lambda: lab.bench("qwen9"), "no workload is called 'qwen9'"),
        (lambda: lab.bench(TINY, formats=["q9"]), "no weight format is called 'q9'"),
        (lambda: lab.bench(TINY, formats=["q8_0+q8_0+q8_0"]), "wanted one name, or gate/up's and down's"),
        (lambda: Settings(states=("hot",)), "wanted some of cold, warm"),
        (lambda: Settings(least=9, most=3), "least <= most"),
        (lambda: Settings(tolerance="generous"), "no tolerance is called 'generous'"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
@pytest.mark.wrong_types
def test_what_cannot_be_asked_is_refused(ask, words: str) -> None:
    with pytest.raises(LabError, match=words):
        ask()


@pytest.mark.wrong_types
@pytest.mark.parametrize("arm", [3, object()])
def test_an_arm_of_another_type_is_refused(arm: object) -> None:
    with pytest.raises(LabTypeError):
        lab.bench(tiny(), rows(), [arm])
