"""`moe-lab simulate`: the columns of lab.simulate, the sums for people, and one line for bad usage."""

import json
from pathlib import Path

import pytest

import moe_lab as lab
from moe_lab.cli import main

DATA = Path(__file__).resolve().parents[2] / "data"
TRACE, MODEL = DATA / "trace.parquet", DATA / "lab-42m.gguf"


def run(capsys, *arguments: str | Path) -> str:
    code = main(["simulate", str(TRACE), "--tokens", "40", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


def test_json_has_the_rows_of_lab_simulate(capsys) -> None:
    how = ("--capacity", "24,48", "--policies", "lru,belady_bypass", "--per-layer", "--step-tokens", "2")
    answer = json.loads(run(capsys, *how, "--model", MODEL, "--json"))
    assert (answer["command"], answer["ok"]) == ("simulate", True)
    trace = lab.RoutingTrace.load(TRACE, tokens=(0, 40))
    table = lab.simulate(
        trace, [24, 48], ["lru", "belady_bypass"], per_layer=True, step_tokens=2, expert_bytes=71168
    )  # fmt: skip
    assert answer["rows"] == [{"order": "text", **row} for row in table.to_dict("records")]


def test_the_table_sums_layers_and_shows_the_gap(capsys) -> None:
    out = run(capsys, "--policies", "random_oldest:percent=50:seed=3", "--controls")
    assert "random_oldest(percent=50, seed=3)" in out
    assert "uniform" in out
    assert "1.000" in out  # the optimum closes all of the gap
    assert "slots shared by all layers" in out
    assert "read, GB" not in out
    assert "read, GB" in run(capsys, "--policies", "lru", "--model", MODEL)


def test_default_is_every_policy_at_a_quarter_of_the_experts(capsys) -> None:
    out = run(capsys)
    for name in ("static", "lfu", "lfuda", "lru", "random_oldest", "s3fifo", "lfu_decay", "predicted", "belady"):
        assert name in out
    assert " 48 " in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--capacity", "many"], "--capacity many"),
        (["--capacity", "0"], "capacity[0] is 0"),
        (["--policies", "mru"], "unknown eviction policy 'mru'"),
        (["--policies", "random_oldest:5:6"], "'6' is no option=number"),
        (["--policies", "random_oldest:percent=x"], "'percent=x' is no option=number"),
        (["--policies", "random_oldest:share=5"], "has no option 'share'"),
        (["--policies", "belady:seed=1"], "belady takes no options"),
        (["--policies", "lru,lru:size=1"], "has no option 'size'"),
        (["--policies", "lru:5%"], "lru takes no options"),
        (["--step-tokens", "0"], "step_tokens is 0"),
        (["--per-layer", "--capacity", "3"], "slots=3 over 6 layers"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_bad_usage_is_one_line(capsys, arguments: list[str], told: str) -> None:
    assert main(["simulate", str(TRACE), "--tokens", "8", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
