"""moe-lab parity: the table, its JSON, budgets and exit codes."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import moe_lab as lab
from moe_lab.cli import main
from moe_lab.cli.parity import over, parse_budget
from moe_lab.errors import LabError
from moe_lab.export import write_gguf
from moe_lab.parity import quantized

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(lab.sample())
TABLE = ["layer", "arm_a", "arm_b", "bit_equal", "equal_share", "max_ulp", "p999_ulp", "nmse_ab", "nmse_a", "nmse_b",
         "flip_share", "shared_a", "shared_b", "backend"]  # fmt: skip


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["parity", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_issues_command_is_quick_and_says_yes() -> None:
    """In a process of its own, without this test run's checks of annotations. One thread that works for less than 20 s
    is done in 20 s wherever it has a core to itself: work, unlike wall, does not hang on who else is there (10 s of it
    on two cores that others shared)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(
        [sys.executable, "-m", "moe_lab", "parity", MODEL, "--arms", "gemv,mmq"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    after, out = resource.getrusage(resource.RUSAGE_CHILDREN), ran.stdout
    assert (ran.returncode, ran.stderr) == (0, "")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert [line[0] for line in lines if line[1:3] == ["gemv", "mmq"]] == list("012345"), out
    assert "512 rows recorded in activations.npz" in out
    assert "256 recorded token ids run through the model, 4 texts" in out


def test_json_has_the_reports_columns(capsys) -> None:
    code, out, _ = call(capsys, MODEL, "--layer", "5", "--arms", "gemv,per_token,reference", "--tokens", "8", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["command"] == "parity"
    assert answer["ok"] is True
    assert [list(row) for row in answer["rows"]] == [TABLE] * 3
    equal, differing, _ = answer["rows"]
    assert (equal["arm_b"], equal["bit_equal"], equal["nmse_ab"]) == ("per_token", True, 0.0)
    assert differing["nmse_ab"] > 1e-6
    assert equal["flip_share"] is None  # the last layer has no next one
    assert (equal["shared_a"], equal["shared_b"]) == ("gemv", "per_token")


def test_a_broken_budget_is_exit_1_and_named(capsys) -> None:
    arguments = (MODEL, "--layer", "0", "--arms", "gemv,reference", "--tokens", "4")
    code, out, err = call(capsys, *arguments, "--budget", "1e-7,max_ulp=1e12")
    assert (code, err) == (1, "")
    assert out.count("budget broken") == 1
    assert "budget broken: layer 0, gemv against reference: nmse_ab is" in out
    assert call(capsys, *arguments, "--budget", "nmse_a=1e-3,nmse_b=1e-9,flip_share=0.5")[0] == 0
    code, out, _ = call(capsys, *arguments, "--budget", "1e-7", "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False


@pytest.fixture(scope="module")
def eight_bits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Layer 5 of the model in a file of its own, with experts in q8_0."""
    layer = quantized(lab.open(MODEL).layer(5), "q8_0")
    return str(write_gguf(tmp_path_factory.mktemp("other") / "eight.gguf", {5: layer}))


def test_two_files_of_one_model_stand_in_one_table(capsys, eight_bits: str) -> None:
    arguments = (MODEL, "--layer", "5", "--tokens", "8", "--other", eight_bits, "--arms")
    code, out, _ = call(capsys, *arguments, "gemv", "--json")
    (row,) = json.loads(out)["rows"]
    assert code == 0
    assert list(row) == TABLE
    assert (row["arm_a"], row["arm_b"]) == ("gemv", "gemv:other")
    assert row["nmse_ab"] < 1e-4  # eight bits hold what two and three do; activations are quantised either way
    code, out, _ = call(capsys, *arguments, "gemv:other,mmq:q4_k", "--truth", eight_bits, "--budget", "1e-4", "--why")
    assert code == 1
    assert "against truth's weights, q8_0; :other is" in out
    assert "gemv:other has q8_0, mmq:q4_k has q4_k" in out
    assert "(w) weights' format" in out
    assert "budget broken: layer 5, gemv:other against mmq:q4_k: nmse_ab" in out


def test_why_names_causes_and_hazards(capsys) -> None:
    code, out, _ = call(capsys, MODEL, "--layer", "5", "--arms", "gemv,mmq", "--tokens", "1", "--why")
    assert code == 0
    assert "(d) sums for the minimum" in out
    assert "exact, 32 subsets" in out or "exact, 64 subsets" in out
    assert "raw-sum decorrelation, mmq gate" in out


def test_other_rows_are_taken_and_their_flips_unknown(capsys, tmp_path) -> None:
    rows = lab.Activations.load(lab.sample().parent / "activations.npz")
    plain = lab.Activations(rows.x[:, :12], rows.layers)
    plain.save(tmp_path / "mine.npz")
    arguments = (MODEL, "--layer", "0", "--arms", "gemv,reference", "--input", str(tmp_path / "mine.npz"))
    code, out, _ = call(capsys, *arguments)
    assert code == 0
    assert "12 rows recorded in mine.npz" in out
    assert "flips in the next layer: unknown" in out
    code, _, err = call(capsys, *arguments, "--budget", "flip_share=0.1")
    assert code == 2
    assert "token ids" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "FILE"),
        ((MODEL, "--arms", "gemv"), "two or more"),
        ((MODEL, "--arms", "gemv,magic"), "magic"),
        ((MODEL, "--layer", "5", "--arms", "gemv,gemv:other"), "second layer"),
        ((MODEL, "--layer", "5", "--arms", "gemv,gemv:q9_z"), "q9_z"),
        ((MODEL, "--layer", "5", "--other", "nowhere.gguf"), "nowhere.gguf"),
        ((MODEL, "--arms", "gemv,reference,table", "--layer", "0", "--tokens", "4"), "table is UNSUPPORTED"),
        ((MODEL, "--layer", "9"), "0, 1, 2, 3, 4, 5"),
        ((MODEL, "--budget", "soon"), "--budget soon"),
        ((MODEL, "--budget", "speed=3"), "nmse_ab, nmse_a"),
        ((MODEL, "--budget", "-1"), "--budget"),
        ((MODEL, "--budget", ""), "no bound"),
        ((MODEL, "--tokens", "513"), "513"),
        ((MODEL, "--input", "nowhere.npz"), "nowhere.npz"),
        (("nowhere.gguf",), "nowhere.gguf"),
        ((MODEL, "--arms", "gemv,reference", "--why", "--layer", "0", "--tokens", "4"), "8-bit activations"),
    ],
    ids=lambda v: " ".join(a for a in v if a != MODEL) if isinstance(v, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_2(capsys, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert words.lower() in err.lower()


def test_a_value_that_is_not_finite_breaks_its_bound() -> None:
    row = {"layer": 2, "arm_a": "gemv", "arm_b": "mmq", "nmse_ab": float("nan"), "max_ulp": 3}
    assert len(over(row, {"nmse_ab": 1.0, "max_ulp": 3.0})) == 1
    assert "nan" in over(row, {"nmse_ab": np.inf})[0]


def test_budgets_are_read_by_name() -> None:
    assert parse_budget(None) == {}
    assert parse_budget("2e-4") == {"nmse_ab": 2e-4}
    assert parse_budget(" nmse_b=1 , flip_share=0.01") == {"nmse_b": 1.0, "flip_share": 0.01}
    with pytest.raises(LabError, match="nan"):
        parse_budget("nan")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--tokens", "0"), "wanted at least one row"),
        (("--device", "foo"), "foo"),
        pytest.param(
            ("--device", "cuda"), "cuda",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_compared_is_one_line(capsys, words: tuple[str, ...], told: str) -> None:
    code, out, err = call(capsys, MODEL, "--layer", "3", "--arms", "gemv,mmq", *words)
    assert code != 0
    assert out == ""
    assert told in err
    assert "Traceback" not in err
