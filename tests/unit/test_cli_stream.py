"""`moe-lab pack`, `calibrate` and `run --packed`."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import moe_lab as lab
from moe_lab.arms import ARMS
from moe_lab.cli import main
from moe_lab.cli.pack import chain
from moe_lab.stream import calibrate
from moe_lab.stream.calibration import load_calibration

Shown = Callable[..., tuple[int, dict, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Shown:
    """(exit code, JSON, stderr) of a command."""

    def shown(*words: object) -> tuple[int, dict, str]:
        code = main([*map(str, words), "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out.strip() else {}, err

    return shown


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "lab.experts"
    assert main(["pack", str(lab.sample()), "-o", str(out), "--json"]) == 0
    return out


def test_pack_writes_every_expert_and_verifies(run: Shown, tmp_path: Path):
    out = tmp_path / "x.experts"
    code, shown, _ = run("pack", lab.sample(), "-o", out, "--verify")
    (row,) = shown["rows"]
    assert (code, shown["ok"], row["experts"], row["layers"], row["order"]) == (0, True, 192, 6, "layer")
    assert row["bytes"] == out.stat().st_size


def test_verify_says_what_it_read(capsys: pytest.CaptureFixture[str], packed: Path):
    assert main(["pack", str(packed), "--verify"]) == 0
    assert "read back 192 rows of 6 layers: CRC-32 of each row, SHA-256" in (out := capsys.readouterr().out)
    assert "all are as they were written" in out


def test_verify_of_a_broken_file_is_exit_code_1(run: Shown, packed: Path, tmp_path: Path):
    code, shown, _ = run("pack", packed, "--verify")
    assert (code, [row["wrong"] for row in shown["rows"]]) == (0, [0] * 6)
    data = bytearray(packed.read_bytes())
    data[-5000] ^= 1
    broken = tmp_path / "broken.experts"
    broken.write_bytes(data)
    code, shown, _ = run("pack", broken, "--verify")
    assert (code, shown["ok"], [row["wrong"] for row in shown["rows"]]) == (1, False, [0] * 5 + [1])


def test_pack_in_the_order_of_a_trace(run: Shown, tmp_path: Path):
    out, trace = tmp_path / "x.experts", Path(lab.sample()).with_name("trace.parquet")
    code, shown, _ = run("pack", lab.sample(), "-o", out, "--order", "coactivation", "--trace", trace, "--verify")
    assert (code, shown["rows"][0]["order"]) == (0, "coactivation")
    with lab.open(lab.sample(), packed=out) as ckpt:
        offsets = ckpt.expert_source.manifest.layers[0].offsets  # type: ignore[attr-defined]
        assert sorted(offsets) != list(offsets)


def test_a_chain_goes_from_the_most_picked_to_its_nearest():
    picks = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 1, 1], [0, 1, 0, 0]], bool)
    assert chain(picks, 4) == [1, 0, 3, 2]
    with pytest.raises(lab.LabError, match="E=4 experts, the model has 5"):
        chain(picks, 5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["pack", "MODEL"], "-o OUT"),
        (["pack", "MODEL", "-o", "x", "--order", "random"], "wanted layer or coactivation"),
        (["pack", "MODEL", "-o", "x", "--order", "coactivation"], "--trace"),
        (["pack", "MODEL", "-o", "x", "--trace", "t.parquet"], "--trace"),
        (["pack", "MODEL", "--verify"], "no packed file of experts"),
        (["pack", "nowhere.gguf", "-o", "x"], "no such file"),
        (["run", "MODEL", "--packed", "x"], "--cache-gib or --cache-slots"),
        (["calibrate", "nowhere"], "no such file"),
        (["calibrate", ".", "--rounds", "0"], "--rounds 0"),
        (["calibrate", ".", "--gib", "-1"], "--gib -1"),
        (["calibrate", ".", "--gib", "1e9"], "--gib 1e+09: wanted the size of a file to write, above 0 and at most"),
    ],
    ids=lambda v: " ".join(v[:1] + v[2:]) if isinstance(v, list) else "",
)
def test_bad_usage_is_one_line(
    run: Shown, words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*[str(Path(lab.sample()).absolute()) if word == "MODEL" else word for word in words])
    assert (code, err.count("\n")) == (2, 1)
    assert told in err
    assert list(tmp_path.iterdir()) == []


def test_a_layer_runs_from_the_packed_file(run: Shown, packed: Path, capsys: pytest.CaptureFixture[str]):
    words = ["run", lab.sample(), "--layer", 1, "--tokens", 2, "--cache-slots", 8, "--packed", packed]
    code, shown, _ = run(*words, "--arm", "reference")
    (row,) = shown["rows"]
    assert (code, row["misses"] > 0, row["io_mode"] in ("direct", "dropped")) == (0, True, True)


def test_another_models_packed_file_is_refused(run: Shown, packed: Path, tmp_path: Path):
    data = packed.read_bytes()
    other = tmp_path / "other.experts"
    with lab.open(lab.sample()) as ckpt:
        other.write_bytes(data.replace(ckpt.model_hash.encode(), b"0" * 64))
    code, _, err = run("run", lab.sample(), "--cache-slots", 8, "--packed", other)
    assert (code, "packed from another model" in err, err.count("\n")) == (2, True, 1)


def test_calibrate_shows_and_keeps_the_disk(run: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOE_LAB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "disk"
    folder.mkdir()
    monkeypatch.setattr(calibrate, "TRIAL_BYTES", 2 << 20)
    code, shown, _ = run("calibrate", folder, "--quick", "--rounds", 1, "--gib", 0.02)
    assert code == 0
    disk = [row for row in shown["rows"] if row["what"].startswith("disk")]
    assert {(row["threads"], row["request_kib"]) for row in disk} == {(t, r) for t in (1, 4) for r in (256, 1024)}
    assert all(row["gb_per_s"] > 0 and row["n"] == 1 for row in disk)
    kept = load_calibration().disk_of(folder)
    assert kept is not None
    assert len(kept.cells) == len(disk)
    assert list(folder.iterdir()) == []


def test_run_step_by_step_is_the_replay(run: Shown):
    words = ("run", lab.sample(), "--tokens", 3, "--step-tokens", 1, "--cache-gib", 0.003, "--policy", "lfu_decay")
    code, shown, _ = run(*words, "--prefetch", 2)
    rows = shown["rows"]
    assert (code, len(rows), {row["layer"] for row in rows}) == (0, 18, set(range(6)))
    assert sum(row["misses"] for row in rows) > 0
    assert sum(row["prefetch_issued"] for row in rows) > 0
    assert all(0 < row["compute_ms"] < row["wall_ms"] for row in rows)


def test_the_help_of_run_names_every_arm(capsys: pytest.CaptureFixture[str]):
    assert main(["run", "--help"]) == 0
    said = capsys.readouterr().out.replace("│", " ").split()
    assert {"auto", *ARMS} <= {word.strip(",.") for word in said}


def test_run_step_by_step_tells_people_a_row_a_layer(capsys: pytest.CaptureFixture[str]):
    words = ["run", str(lab.sample()), "--tokens", "2", "--step-tokens", "1", "--layer", "1", "--cache-slots", "4"]
    assert main([*words, "--prefetch", "2", "--policy", "random_oldest:5%"]) == 0
    out = capsys.readouterr().out
    assert "no prediction from layer 1: it is the last MoE layer" in out
    assert "policy='random_oldest(percent=5)'" in out
    assert "demand wait ms" in out
    assert "2 recorded tokens, 1 a step" in out
    assert "streamed, cold: ExpertCache(slots=4" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--prefetch", "2"], "--step-tokens"),
        (["--step-tokens", "1", "--prefetch", "2"], "--cache-gib"),
        (["--step-tokens", "0"], "step_tokens"),
        (["--step-tokens", "1", "--cache-slots", "4", "--policy", "fifo"], "unknown eviction policy"),
    ],
    ids=lambda v: "-".join(v).strip("-") if isinstance(v, list) else "",
)
def test_run_refuses_what_cannot_be(run: Shown, words: list[str], told: str):
    code, _, err = run("run", lab.sample(), "--tokens", 2, *words)
    assert code == 2
    assert told in err
    assert err.count("\n") == 1
