"""The command line: exit codes, one line on stderr, JSON with documented columns."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_lab.cli import main
from moe_lab.timing import PHASES

MODEL = Path(__file__).resolve().parents[2] / "data" / "lab-42m.gguf"
TIMING = {
    "layer",
    "arm",
    "shared_arm",
    "backend",
    "tokens",
    "other_ms",
    "wall_ms",
    "hits",
    "misses",
    "bytes_read",
    "submissions",
    "launches",
}


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "command"),
        (("frobnicate",), "frobnicate"),
        (("run",), "file"),
        (("run", str(MODEL), "--tokens", "many"), "--tokens"),
        (("run", str(MODEL), "--tokens", "-3"), "-3"),
        (("run", str(MODEL), "--tokens", "5000"), "512"),
        (("run", str(MODEL), "--layer", "9"), "0, 1, 2, 3, 4, 5"),
        (("run", str(MODEL), "--arm", "magic"), "magic"),
        (("run", str(MODEL), "--cache-slots", "0"), "slots=0"),
        (("run", str(MODEL), "--cache-gib", "0.00001"), "71,168"),
        (("run", str(MODEL), "--device", "tpu"), "tpu"),
        (("run", "nowhere.gguf"), "nowhere.gguf"),
        (("run", str(MODEL), "--input", "nowhere.npz"), "nowhere.npz"),
        (("inspect", __file__), "test_cli.py"),
        (("report", "--model", "nowhere.gguf"), "nowhere.gguf"),
        (("report", "--notebook", "nowhere.ipynb"), "nowhere.ipynb"),
    ],
    ids=lambda v: " ".join(Path(a).name for a in v) if isinstance(v, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_2(capsys, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert words in err


def test_run_prints_the_timing_columns(capsys) -> None:
    code, out, _ = call(
        capsys, "run", str(MODEL), "--layer", "1", "--tokens", "8", "--arm", "gemv", "--cache-slots", "6", "--json"
    )
    answer = json.loads(out)
    assert code == 0
    assert {"command", "ok", "device", "backend", "rows"} == set(answer)
    (row,) = answer["rows"]
    assert {f"{p}_ms" for p in PHASES} | TIMING <= set(row)
    assert (row["layer"], row["tokens"], row["arm"]) == (1, 8, "gemv")
    assert row["misses"] >= 6
    assert row["bytes_read"] == row["misses"] * 71168


def test_inspect_counts_bytes_of_the_shipped_model(capsys) -> None:
    code, out, _ = call(capsys, "inspect", str(MODEL), "--json")
    rows = json.loads(out)["rows"]
    assert code == 0
    assert len(rows) == 6
    # 2 x 256 rows of one Q2_K block and 256 rows of one Q3_K block
    assert {r["bytes_per_expert"] for r in rows} == {2 * 256 * 84 + 256 * 110}
    assert {r["format_gate"] for r in rows} == {"q2_k"}


def test_tables_are_for_people(capsys) -> None:
    assert call(capsys, "inspect", str(MODEL), "--gib", "0.01")[0] == 0
    code, out, err = call(capsys, "doctor")
    assert (code, err) == (0, "")
    assert "backend" in out


@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_a_damaged_model_is_one_line_and_exit_2(capsys, tmp_path: Path, damage: str) -> None:
    data = bytearray(MODEL.read_bytes())
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data[: len(data) // 2] if damage == "truncated" else b"\0" * 4096 + data[4096:])
    code, _, err = call(capsys, "run", str(bad), "--layer", "0", "--tokens", "4", "--cache-slots", "4")
    assert code == 2
    assert err.count("\n") == 1
    assert "bad.gguf" in err


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "moe_lab", "run", "nowhere.gguf"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "moe-lab: nowhere.gguf: there is no such file. Check the path.\n"


@pytest.mark.parametrize("how", ["module", "script", "library"])
def test_ctrl_c_while_torch_loads_is_one_line(tmp_path: Path, how: str) -> None:
    """A torch that gets the signal in the middle of its import stands in for seconds of loading the real one."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"
    )
    (tmp_path / "moe-lab").write_text("from moe_lab.cli import main\nraise SystemExit(main())\n")
    as_asked = {"module": ["-m", "moe_lab", "doctor"], "script": [str(tmp_path / "moe-lab"), "doctor"],
                "library": ["-c", "import moe_lab"]}  # fmt: skip
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, *as_asked[how]], capture_output=True, text=True, env=env, timeout=25,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs inherit "ignore"
    )  # fmt: skip
    if how == "library":
        assert done.stderr.endswith("KeyboardInterrupt\n"), "a program of one's own handles its interrupts itself"
    else:
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "moe-lab: stopped.\n")
