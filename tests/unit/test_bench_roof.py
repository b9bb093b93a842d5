"""What is measured once and kept: the roof, and the table that `auto` goes by."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from moe_lab.arms import ARMS, table
from moe_lab.arms.table import own_path, ranked, write_table
from moe_lab.arms.table_file import Row, load_rows
from moe_lab.bench import roof as roofs
from moe_lab.bench import tune as tune_module
from moe_lab.bench import workloads
from moe_lab.bench.cell import Settings
from moe_lab.bench.cells import Workload
from moe_lab.bench.roof import Roof, arithmetic_of, roof
from moe_lab.bench.tune import table_rows, tune, tuned
from moe_lab.bench.weights import make_layer
from moe_lab.bench.workloads import LayerShape
from moe_lab.errors import LabError
from moe_lab.formats import get_format
from moe_lab.runs import Case, Record, Spread, Status
from moe_lab.system.environment import cpu_name
from moe_lab.system.user_cache import cache_folder, slug

FAKE = Roof(cpu_name(), "none", 100.0, 90.0, 1.0, 3.0, {"fp32": 0.5, "bf16": 1.0, "int8": 2.0})
SHAPE = LayerShape("tiny", 64, 96, 6, 2)
Q8 = ("q8_0",) * 3


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty cache folder, and tables forgotten before and after."""
    monkeypatch.setenv("MOE_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(workloads.SHAPES, "tiny", SHAPE)  # a shape of record takes the torch paths a minute
    _forget()
    yield tmp_path / "cache"
    _forget()


def _forget() -> None:
    table.table.cache_clear()
    table._nearest.cache_clear()


@pytest.fixture
def measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the devices whose roof was measured, instead of measuring."""
    found: list[str] = []
    monkeypatch.setattr(roofs, "_cpu_roof", lambda name: (found.append(name), FAKE)[1])
    return found


def test_a_roof_is_measured_once_and_again_when_asked(measured: list[str], cache: Path) -> None:
    assert [roof(), roof(), roof("cpu")] == [FAKE] * 3
    assert len(measured) == 1
    assert roof(again=True) == FAKE
    assert len(measured) == 2
    assert len(list(cache.rglob("*.json"))) == 1


def test_a_roof_of_another_version_is_measured_anew(measured: list[str], cache: Path) -> None:
    roof()
    file = next(cache.rglob("*.json"))
    file.write_text(json.dumps({"version": 0}))
    assert roof() == FAKE
    assert len(measured) == 2


@pytest.mark.parametrize("text", ["{", json.dumps({"version": 1, "device": "x"})], ids=["no JSON", "half a roof"])
def test_a_damaged_roof_names_its_file(measured: list[str], cache: Path, text: str) -> None:
    roof()
    file = next(cache.rglob("*.json"))
    file.write_text(text)
    with pytest.raises(LabError, match=file.name):
        roof()


def test_a_real_roof_is_plausible() -> None:
    found = roof()
    assert found.device == cpu_name()
    assert 0.1 < found.read_gb_per_s < 5000
    assert 0.01 < found.eager_us < 1000
    assert found.tflops["fp32"] > 0


def test_the_longer_of_bytes_and_arithmetic_bounds() -> None:
    assert FAKE.bound_ms(1e8, {}) == pytest.approx(1.0)  # 100 MB at 100 GB/s
    assert FAKE.bound_ms(1e6, {"bf16": 5e9, "q2_k": 1e10}) == pytest.approx(10.0)  # 5 ms at 1, 5 ms at 2 TFLOP/s
    assert FAKE.predicted_ms(1e8, {}, 50, graph=False) == pytest.approx(1.15)
    assert FAKE.predicted_ms(1e8, {}, 50, graph=True) == pytest.approx(1.05)
    assert FAKE.rate("fp8_block") == 2.0  # none measured: the best, so that a floor stays a floor
    formats = ("f32", "f16", "q3_k", "mxfp4", "mxfp4_oss", "nvfp4_ct", "int4_g32", "my_own")
    kinds = ("fp32", "bf16", "int8", "int8", "bf16", "fp8", "bf16", "bf16")
    assert tuple(map(arithmetic_of, formats)) == kinds


@pytest.mark.parametrize(("variable", "where"), [("XDG_CACHE_HOME", "moe-lab"), ("HOME", ".cache/moe-lab")])
def test_the_cache_folder_follows_the_system(tmp_path, monkeypatch, variable: str, where: str) -> None:
    for name in ("MOE_LAB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    assert cache_folder() == tmp_path / where
    assert slug("NVIDIA H200", "580.159.04") == "nvidia-h200-580.159.04"


def test_a_folder_that_cannot_be_made_is_named(measured: list[str], tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOE_LAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(LabError, match="MOE_LAB_CACHE names another"):
        roof()


def row(tokens: int, *arms: str, formats: tuple[str, ...] = Q8, experts: int = 6, d_model: int = 64) -> Row:
    return Row(formats, d_model, 96, experts, 2, tokens, arms, tuple(1.0 + i for i, _ in enumerate(arms)))


def put(*rows: Row) -> None:
    write_table(own_path(cpu_name()), cpu_name(), rows, {})


def test_auto_goes_by_the_table_and_says_what_it_took(cache: Path) -> None:
    layer, x = make_layer(SHAPE, "q8_0"), torch.randn(70, 64)
    assert layer(x[:1]).arm == "gemv"
    put(row(1, "reference", "gemv"), row(64, "per_token", "reference"))
    assert [layer(x[:t]).arm for t in (1, 7, 9, 70)] == ["reference", "reference", "per_token", "per_token"]
    assert make_layer(SHAPE, "mxfp4")(x[:1]).arm == "gemv"  # no row for the format


def test_auto_skips_what_the_table_names_but_cannot_run(cache: Path) -> None:
    put(row(1, "sold_elsewhere", "grouped", "reference", formats=("f32",) * 3))
    assert make_layer(SHAPE, "f32")(torch.randn(1, 64)).arm == "reference"


def test_auto_skips_an_arm_that_takes_fewer_tokens_than_came(cache: Path) -> None:
    layer, x = make_layer(SHAPE, "q8_0"), torch.randn(8, 64)
    put(row(1, "table", "reference"), row(64, "per_token"))
    assert [layer(x[:t]).arm for t in (1, 2, 7)] == ["table", "reference", "reference"]


def test_the_nearest_shape_decides_before_the_nearest_t(cache: Path) -> None:
    put(row(1, "gemv", d_model=4096), row(512, "reference"), row(1, "per_token", experts=60))
    spec = make_layer(SHAPE, "q8_0").spec
    assert ranked("torch", Q8, spec, 1) == ("reference",)
    assert ranked("torch", Q8, replace(spec, d_model=2048), 1) == ("gemv",)
    assert ranked("interpreter", Q8, spec, 1) == ()
    assert ranked("torch", ("f32",) * 3, spec, 1) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "cannot read"),
        ("[]", "version 'list'"),
        ('{"version": 2}', "version 2; wanted 1"),
        ("[" * 100_000, "cannot read"),
        ('{"version": 1}', "rows is None; wanted a list"),
        ('{"version": 1, "rows": [3]}', r"rows\[0\] is 3; wanted an object"),
        ('{"version": 1, "rows": [{"formats": ["q8_0"]}]}', r"rows\[0\] is no d_model, d_expert"),
    ],
    ids=lambda text: text[:32],
)
def test_a_damaged_table_names_its_file(cache: Path, text: str, words: str) -> None:
    path = own_path(cpu_name())
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(LabError, match=words) as caught:
        make_layer(SHAPE, "q8_0")(torch.randn(1, 64))
    assert str(path) in str(caught.value)


CELLS = {
    "ms-nan": ("ms", [1.0, math.nan], "ms[1] is nan; wanted milliseconds"),
    "ms-inf": ("ms", [math.inf, 1.0], "ms[0] is inf; wanted milliseconds"),
    "ms-digits": ("ms", [10**400, 1.0], "ms[0] is 1000"),
    "ms-text": ("ms", [1.0, "2"], "ms[1] is 2; wanted milliseconds"),
    "ms-true": ("ms", [True, 1.0], "ms[0] is True; wanted milliseconds"),
    "ms-short": ("ms", [1.0], "ms is [1.0]; wanted 2 times, one an arm"),
    "arms-layout": ("arms", ["gemv@tile", "gemv"], "arms[0] is gemv@tile; wanted ARM or ARM@LAYOUT of raw, planar"),
    "arms-twice": ("arms", ["gemv", "gemv"], "wanted each arm once"),
    "arms-none": ("arms", [], "arms is []; wanted a list of one text or more"),
    "arms-text": ("arms", "gemv", "arms is gemv; wanted a list"),
    "formats-one": ("formats", ["q8_0"], "wanted those of gate, up and down"),
    "formats-number": ("formats", [1, 2, 3], "formats is [1, 2, 3]; wanted a list of one text"),
    "experts-zero": ("experts", 0, "experts is 0; wanted a whole number"),
    "tokens-float": ("tokens", 1.0, "tokens is 1.0; wanted a whole number"),
    "d_model-digits": ("d_model", 10**400, "d_model is 1000"),
}


@pytest.mark.parametrize("case", CELLS)
def test_a_wrong_cell_is_named_with_its_file(tmp_path: Path, case: str) -> None:
    column, value, words = CELLS[case]
    good = asdict(row(1, "gemv", "reference"))
    path = tmp_path / "arms.json"
    path.write_text(json.dumps({"version": 1, "rows": [good, {**good, column: value}]}))
    with pytest.raises(LabError) as caught:
        load_rows(path)
    assert str(caught.value).startswith(f"{path} is no arm table: rows[1].{column}")
    assert words in str(caught.value)


def record(arm: str, ms: float | None, tokens: int = 1) -> Record:
    case = Case(workload="uniform", model="tiny", d_model=64, d_expert=96, experts=6, top_k=2, tokens=tokens)
    about = {"what": "layer", "case": case, "arm": arm, "format": "q2_k+q3_k", "backend": "torch"}
    if ms is None:
        return Record(status=Status.INCORRECT, error=1.0, error_measure="NMSE", reason="wrong", **about)
    spread = Spread.of([ms])
    return Record(status=Status.PASSED, spread=spread, error=0.0, error_measure="NMSE", method="host clock", **about)


def test_a_table_ranks_right_arms_and_takes_a_tie_by_the_fixed_order() -> None:
    records = [record("per_token", 1.0), record("reference", 1.01), record("gemv", 1.02), record("fast", None)]
    records += [record("per_token", 1.0, 8), record("gemv", 1.5, 8), record("fast", None, 9)]
    rows = table_rows(records)
    assert [(r.tokens, r.arms) for r in rows] == [(1, ("gemv", "reference", "per_token")), (8, ("per_token", "gemv"))]
    assert rows[0].formats == ("q2_k", "q2_k", "q3_k")
    assert rows[0].ms == (1.02, 1.01, 1.0)


def test_tune_measures_and_auto_follows(measured: list[str], cache: Path, tmp_path: Path) -> None:
    quick = Settings(cell_ms=1.0, most=5, shrink=1)
    about = {"models": ["tiny"], "formats": ["q8_0"], "tokens": [1], "settings": quick}
    run, path = tune("cpu", **about)
    assert len(measured) == 1
    assert path == own_path(cpu_name())
    assert {r.arm for r in run.records} == set(tuned("cpu")) >= {"reference", "gemv"}
    spec = make_layer(SHAPE, "q8_0").spec
    taken = ranked("torch", Q8, spec, 1)
    times = {r.arm: r.spread.p50 for r in run.records if r.status is Status.PASSED}
    assert set(taken) == set(times)
    assert times[taken[0]] <= 1.03 * min(times.values())
    _, shipped = tune("cpu", folder=tmp_path, **about)
    assert shipped == tmp_path / f"{slug(cpu_name())}.json"
    assert json.loads(shipped.read_text())["about"]["torch"] == torch.__version__


def test_a_cell_that_the_budget_cut_short_makes_no_row(
    measured: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tune_module.measure

    def short(workload: Workload, *given):
        run, left = plain(workload, *given)
        return replace(run, records=[r for r in run.records if r.arm != "gemv" or r.case.tokens == 1]), left

    monkeypatch.setattr(tune_module, "measure", short)
    quick = Settings(cell_ms=1.0, most=5, shrink=1)
    tune("cpu", models=["tiny"], formats=["q8_0"], tokens=[1, 2], settings=quick)
    assert [row.tokens for row in table.table(cpu_name())] == [1]


def test_what_was_measured_before_an_interrupt_is_kept(
    measured: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, asked = tune_module.measure, []

    def until(workload: Workload, *given):
        asked.append(workload.formats)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return plain(workload, *given)

    monkeypatch.setattr(tune_module, "measure", until)
    quick = Settings(cell_ms=1.0, most=5, shrink=1)
    with pytest.raises(KeyboardInterrupt):
        tune("cpu", models=["tiny"], formats=["q8_0", "q4_0"], tokens=[1], settings=quick)
    assert asked == [("q8_0",), ("q4_0",)]
    assert {row.formats for row in table.table(cpu_name())} == {Q8}


def test_arms_without_a_chance_are_not_timed() -> None:
    assert {"reference", "gemv"} <= {*tuned("cpu")}
    assert {"gemv", "grouped"} <= {*tuned("cuda")}
    assert "per_token" not in tuned("cpu")
    assert not {"per_token", "reference", "table"} & {*tuned("cuda")}
    assert {"mmq", "gemv_mmq"} <= {*tuned("cuda", 9)}
    assert {*tuned("cuda", 8)} == {"gemv", "grouped", "gemv@planar", "grouped@planar", "gemv@tiles"}


def test_a_short_budget_leaves_out_tokens_and_no_format(
    measured: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, now, asked = tune_module.measure, [0.0], []

    def ten_seconds(workload: Workload, *given):
        now[0] += 10.0
        asked.append((workload.formats, workload.tokens))
        return plain(workload, *given)

    monkeypatch.setattr(tune_module, "measure", ten_seconds)
    monkeypatch.setattr(tune_module.time, "perf_counter", lambda: now[0])
    quick = Settings(cell_ms=1.0, most=5, shrink=1, budget_s=25.0)
    with pytest.warns(UserWarning, match="left out tiny in q4_0 at T=2 and on"):
        tune("cpu", models=["tiny"], formats=["q8_0", "q4_0"], tokens=[1, 2], settings=quick)
    assert asked == [(("q8_0",), (1,)), (("q4_0",), (1,)), (("q8_0",), (2,))]


@pytest.mark.parametrize("path", sorted(table.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_table_is_of_its_device_and_of_this_package(path: Path) -> None:
    whole = json.loads(path.read_text())
    assert slug(whole["device"]) == path.stem
    assert {"driver", "torch", "triton", "commit", "moe_lab", "date"} == set(whole["about"])
    assert whole["about"]["commit"] != "none"
    for row in load_rows(path):
        assert {table.split_layout(name)[0] for name in row.arms} <= set(ARMS), row
        assert row.ms[0] <= 1.03 * min(row.ms), row
        assert len({get_format(name) for name in row.formats}) <= 2


def test_tuning_that_measured_nothing_leaves_the_table(measured: list[str], cache: Path) -> None:
    put(row(1, "reference"))
    with pytest.warns(UserWarning, match="left out"), pytest.raises(LabError, match="no table was written"):
        tune("cpu", models=["tiny"], formats=["q8_0"], tokens=[1], settings=Settings(budget_s=1e-9))
    assert ranked("torch", Q8, make_layer(SHAPE, "q8_0").spec, 1) == ("reference",)
