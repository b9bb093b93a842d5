"""A user's own arm: taken wherever a name is, watched, named when it fails, refused in one sentence when half made."""

import functools
import math
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import silu

import moe_lab as lab
from moe_lab.arms import ARMS, Gemv
from moe_lab.bench.batching import measure_batching
from moe_lab.bench.cell import Settings
from moe_lab.formats import quantize
from moe_lab.layer import MoELayer, Options, SharedWeights

E, K, D, F, T = 6, 2, 32, 64, 9
QUICK = Settings(cell_ms=1, least=1, most=2, states=("warm",))


@functools.cache
def make_layer(*, shared: bool = False) -> MoELayer:
    g = torch.Generator().manual_seed(3)
    shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    weights = {p: quantize(torch.randn(*s, generator=g) * s[-1] ** -0.5, "q8_0") for p, s in shapes.items()}
    own = SharedWeights(*(q[0] for q in weights.values())) if shared else None
    spec = lab.MoESpec(lab.RouterSpec(E, K), D, F, shared=lab.SharedSpec(F) if shared else None)
    return MoELayer.from_tensors(spec, router=torch.randn(E, D, generator=g), shared=own, **weights)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(4))


class Mine:
    """As the documentation shows it."""

    name = "mine"

    def supports(self, formats, backend):
        return None

    def experts(self, x, stack, schedule, groups, y, ctx):
        for g in groups:
            gate, up, down = (stack.values(part, g.expert) for part in ("gate", "up", "down"))
            for p in range(g.first, g.first + g.rows):
                token, slot = schedule.token[p], schedule.slot[p]
                row = x[token].float()
                y[token, slot] = (down @ (silu(gate @ row) * (up @ row))).to(y.dtype)


class WithShared(Mine):
    """A subclass that serves the shared expert too."""

    name = "with_shared"

    def shared(self, x, stack, ctx):
        gate, up, down = (stack.values(part, 0) for part in ("gate", "up", "down"))
        return ctx.store((silu(x.float() @ gate.T) * (x.float() @ up.T)) @ down.T)


class Lent:
    """No subclass of anything: lends the members of another arm."""

    def __init__(self, arm, name):
        self.arm, self.name = arm, name

    def __getattr__(self, member):
        return getattr(self.arm, member)


USED = {
    "layer": lambda layer, x, arm: layer(x, arm),
    "compare": lambda layer, x, arm: lab.compare(layer, x, ["reference", arm]),
    "bench": lambda layer, x, arm: lab.bench(layer, x, [arm], settings=QUICK),
    "batching": lambda layer, x, arm: measure_batching(layer, x, arms=[arm], tokens=[2], repeats=1),
    "shared": lambda layer, x, arm: make_layer(shared=True)(x, options=Options(shared_arm=arm)),
}


@pytest.mark.parametrize("arm", [Mine(), WithShared(), Lent(Mine(), "lent")], ids=lambda a: a.name)
def test_an_object_stands_beside_the_names_in_every_table(arm: object, x: torch.Tensor) -> None:
    layer = make_layer()
    assert layer(x, arm).arm == layer(x, arm).timing.arm == arm.name
    report = lab.compare(layer, x, ["gemv", arm, "reference"])
    assert list(report.outputs) == list(report.checks.arm) == ["gemv", arm.name, "reference"]
    assert set(report.checks.status) == {"PASSED"}
    assert {*report.bins().arm_b} == {arm.name, "reference"}
    timed = lab.bench(layer, x, ["reference", arm], settings=QUICK)
    assert dict(zip(timed.arm, timed.status, strict=True)) == {"reference": "PASSED", arm.name: "PASSED"}
    assert list(USED["batching"](layer, x, arm).arm) == [arm.name]


def test_the_shared_expert_goes_to_whom_it_can(x: torch.Tensor) -> None:
    layer = make_layer(shared=True)
    assert layer(x, Mine()).timing.shared_arm == "reference"
    own = layer(x, WithShared())
    assert own.timing.shared_arm == "with_shared"
    assert lab.compare(layer, x, [Mine(), WithShared()]).checks.nmse.max() < lab.tolerances.tol("gemv/emulation")
    with pytest.raises(lab.LabError, match=r"arm 'mine' has no shared\(x, stack, ctx\)"):
        layer(x, options=Options(shared_arm=Mine()))


class NoExperts:
    name = "no_experts"

    def supports(self, formats, backend):
        return None


class OldSignature(Mine):
    name = "old_signature"

    def experts(self, x, stack):
        pass


HALF = {"no-experts": (NoExperts(), "'no_experts' (NoExperts) lacks experts(x, stack, schedule, groups, y, ctx)"),
        "old-signature": (OldSignature(), "has experts(x, stack), which cannot be called as experts(x, stack, sched"),
        "class": (Mine, "arm Mine is a class; pass an object of it, Mine()"),
        "number": (7, "arm of type int lacks name, supports(formats, backend), experts(")}  # fmt: skip


@pytest.mark.wrong_types
@pytest.mark.parametrize("door", USED)
@pytest.mark.parametrize("case", HALF)
def test_a_half_made_arm_is_refused_at_every_door(case: str, door: str, x: torch.Tensor) -> None:
    arm, says = HALF[case]
    with pytest.raises(lab.LabTypeError) as caught:
        USED[door](make_layer(), x, arm)
    assert says in str(caught.value)
    assert "members of moe_lab.arms.Arm" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("door", USED)
@pytest.mark.parametrize("name", [*ARMS, "auto"])
def test_a_name_of_the_labs_arms_is_taken(name: str, door: str, x: torch.Tensor) -> None:
    with pytest.raises(lab.LabError, match=f"arm '{name}' is the lab's own; give yours another name"):
        USED[door](make_layer(), x, Lent(Mine(), name))


def test_a_subclass_of_ours_wants_its_own_name_but_another_of_ours_does_not(x: torch.Tensor) -> None:
    class Renamed(Gemv):
        name = "renamed"

    layer = make_layer()
    assert layer(x, Renamed()).out.equal(layer(x, Gemv()).out)
    with pytest.raises(lab.LabError, match="arm 'gemv' is the lab's own"):
        layer(x, type("Same", (Gemv,), {})())


@pytest.mark.parametrize("answer", [True, False, 0, ["q8_0"]], ids=repr)
@pytest.mark.parametrize("member", ["supports", "lacks"])
def test_an_answer_that_is_no_reason_is_refused(member: str, answer: object, x: torch.Tensor) -> None:
    arm = Mine()
    setattr(arm, member, (lambda formats, backend: answer) if member == "supports" else (lambda spec: answer))
    with pytest.raises(lab.LabTypeError, match=f"arm 'mine': {member} gave .*; wanted None where it serves"):
        make_layer()(x, arm)


def test_a_reason_refuses_by_name(x: torch.Tensor) -> None:
    arm = Mine()
    arm.lacks = lambda spec: "a clamp"
    with pytest.raises(lab.LabError, match="arm 'mine' cannot run this layer on torch: it has no a clamp"):
        make_layer()(x, arm)


def raising(error: Exception, member: str) -> WithShared:
    def fail(*_):
        raise error

    arm = WithShared()
    setattr(arm, member, {"supports": lambda formats, backend: fail(), "lacks": lambda spec: fail(),
                          "experts": lambda x, stack, schedule, groups, y, ctx: fail(),
                          "shared": lambda x, stack, ctx: fail()}[member])  # fmt: skip
    return arm


@pytest.mark.parametrize("member", ["supports", "lacks", "experts", "shared"])
def test_what_an_arm_raises_comes_with_its_name(member: str, x: torch.Tensor) -> None:
    cause = KeyError("scale")
    with pytest.raises(lab.LabError, match=f"arm 'with_shared' raised KeyError in {member}: 'scale'") as caught:
        make_layer(shared=True)(x, raising(cause, member))
    assert caught.value.__cause__ is cause


ENDS = {
    "unsupported": (lambda: Refuses(), "UNSUPPORTED", "arm 'refuses' cannot run this layer on torch: no q8_0 here."),
    "raises": (lambda: raising(KeyError("scale"), "experts"), "ERROR", "KeyError: 'scale'"),
    "supports raises": (lambda: raising(KeyError("scale"), "supports"), "ERROR", "KeyError: 'scale'"),
    "memory": (lambda: raising(MemoryError("8 GiB"), "experts"), "OOM", "MemoryError: 8 GiB"),
    "returns": (lambda: Returns(), "ERROR", "LabTypeError: arm 'returns': experts returned a Tensor"),
    "the lab's": (lambda: "table", "UNSUPPORTED", "arm 'table' serves T <= 1 tokens"),
}


class Refuses(Mine):
    name = "refuses"

    def supports(self, formats, backend):
        return "no q8_0 here"


class Returns(Mine):
    name = "returns"

    def experts(self, x, stack, schedule, groups, y, ctx):
        return x


@pytest.mark.parametrize("case", ENDS)
def test_compare_keeps_the_others_when_one_arm_fails(case: str, x: torch.Tensor) -> None:
    make, status, reason = ENDS[case]
    arm = make()
    name = arm if isinstance(arm, str) else arm.name
    report = lab.compare(make_layer(shared=True), x, ["reference", arm, "gemv"])
    checks = report.checks.set_index("arm")
    assert list(checks.index) == ["reference", name, "gemv"]
    assert list(checks.status) == ["PASSED", status, "PASSED"]
    assert checks.reason[name].startswith(reason)
    assert checks.nmse.isna().tolist() == [False, True, False]
    assert report.table[["arm_a", "arm_b"]].to_numpy().tolist() == [["reference", "gemv"]]
    assert list(report.outputs) == ["reference", "gemv"]
    assert status in report._repr_html_()


def test_a_comparison_with_one_arm_left_has_no_pairs(x: torch.Tensor) -> None:
    report = lab.compare(make_layer(), x, ["reference", Refuses()])
    assert (len(report.table), "nmse_ab" in report.table, report.first_difference) == (0, True, None)
    assert "UNSUPPORTED" in report._repr_html_()
    with pytest.raises(lab.LabError, match="wants two outputs; only reference ran"):
        report.bins()


def test_a_comparison_in_which_every_arm_fails_raises(x: torch.Tensor) -> None:
    with pytest.raises(lab.LabError, match="arm 'refuses' cannot run this layer on torch: no q8_0 here"):
        lab.compare(make_layer(), x, [Refuses(), Returns()])


class Counts(Mine):
    """Adds up what it reads, as arms may."""

    name = "counts"

    def experts(self, x, stack, schedule, groups, y, ctx):
        super().experts(x, stack, schedule, groups, y, ctx)
        ctx.work.weight_bytes += stack.expert_bytes * sum(g.rows for g in groups)


def test_bytes_that_an_arm_does_not_count_are_unknown(x: torch.Tensor) -> None:
    layer = make_layer(shared=True)
    expert = layer.experts.stack.expert_bytes
    assert math.isnan(layer(x, Mine()).timing.weight_bytes)
    assert math.isnan(layer(x, "gemv", options=Options(shared_arm=WithShared())).timing.weight_bytes)
    assert layer(x, Counts()).timing.weight_bytes == (T * K + 1) * expert
    assert layer(x, "gemv").timing.weight_bytes > 0
    df = measure_batching(layer, x, arms=["gemv", Mine()], tokens=[1, 8], repeats=1)
    assert df.weight_bytes.isna().tolist() == [False, True, False, True]
    assert "submissions, weight bytes unknown" in lab.plot.batching(df).figure.alt


def test_nothing_is_predicted_from_bytes_that_nobody_knows(x: torch.Tensor) -> None:
    cold = Settings(cell_ms=1, least=1, most=2, states=("cold",))
    df = lab.bench(make_layer(), x, ["gemv", Mine(), Counts()], settings=cold).set_index("arm")
    assert set(df.status) == {"PASSED"}
    assert df.predicted.isna().to_dict() == {"gemv": False, "mine": True, "counts": False}
    assert df.floor.notna().all()
    lab.plot.bench(df.reset_index())


@pytest.mark.parametrize(
    "error", [MemoryError("8 GiB"), torch.OutOfMemoryError("8 GiB")], ids=lambda e: type(e).__name__
)
def test_running_out_of_memory_keeps_its_type(error: Exception, x: torch.Tensor) -> None:
    with pytest.raises(type(error)) as caught:
        make_layer()(x, raising(error, "experts"))
    assert caught.value.__notes__ == ["It was raised in arm 'with_shared', experts."]
    assert list(lab.bench(make_layer(), x, [raising(error, "experts")], settings=QUICK).status) == ["OOM"]


def test_rows_returned_instead_of_written_are_refused(x: torch.Tensor) -> None:
    arm = Mine()
    arm.experts = lambda x, stack, schedule, groups, y, ctx: torch.zeros_like(y)
    with pytest.raises(lab.LabTypeError, match=r"arm 'mine': experts returned a Tensor; it writes rows into y"):
        make_layer()(x, arm)


def test_shared_rows_of_another_shape_are_refused(x: torch.Tensor) -> None:
    arm = WithShared()
    arm.shared = lambda x, stack, ctx: x[:, :3]
    with pytest.raises(
        lab.LabTypeError, match=r"'with_shared': shared gave torch.float32 \(9, 3\); wanted .* \(9, 32\)"
    ):
        make_layer(shared=True)(x, arm)


class Misbehaves(Mine):
    """Right, and then one thing more."""

    def __init__(self, name, then):
        self.name, self.then = name, then

    def experts(self, x, stack, schedule, groups, y, ctx):
        super().experts(x, stack, schedule, groups, y, ctx)
        self.then(x, schedule, groups, y)


def forget_a_row(x, schedule, groups, y):
    y[schedule.token[groups[-1].first], schedule.slot[groups[-1].first]] = float("nan")


def write_elsewhere(x, schedule, groups, y):
    y[-1, -1] = 1.0  # the token whose slot routing left out


MISDEEDS = {
    "forgets": (forget_a_row, "it left 1 of 17 rows of y unwritten or not finite"),
    "elsewhere": (write_elsewhere, "it wrote rows of y that were not its own"),
    "changes-x": (lambda x, schedule, groups, y: x.mul_(1.5), "it changed its input x"),
    "wrong": (lambda x, schedule, groups, y: y.mul_(1.1), "NMSE 0.01 is above 0.0005, the bound 'bench/layer'"),
}


@pytest.mark.parametrize("case", MISDEEDS)
def test_compare_notices_what_an_arm_must_not_do(case: str, x: torch.Tensor) -> None:
    then, says = MISDEEDS[case]
    layer = make_layer()
    picks = layer.route(x)
    picks.ids[-1, -1] = -1  # nobody's slot
    checks = lab.compare(layer, x.clone(), ["reference", Misbehaves(case, then)], routing=picks).checks.set_index("arm")
    assert checks.status["reference"] == "PASSED"
    assert checks.status[case] == "INCORRECT"
    assert checks.reason[case].startswith(says)


def test_being_watched_changes_no_bit(x: torch.Tensor) -> None:
    layer = make_layer()
    assert lab.compare(layer, x, ["reference", Mine()]).outputs["mine"].equal(layer(x, Mine()).out)


def test_the_readmes_arm_runs_as_it_stands(x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", readme, re.S) if "class MyGemv" in b)
    monkeypatch.chdir(tmp_path)  # it saves a run
    names = {"lab": lab, "layer": make_layer(), "x": x}
    exec(block, names)
    assert len(list(tmp_path.glob("runs/*.parquet"))) == 1
    for dtype in (torch.float32, torch.bfloat16):
        checks = lab.compare(make_layer(), x.to(dtype), ["reference", names["MyGemv"]()]).checks
        assert set(checks.status) == {"PASSED"}
