"""`moe-lab bench`, and the figure of its frame."""

import json
from pathlib import Path

import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import moe_lab as lab
from moe_lab.bench.peers import peer_rows
from moe_lab.cli import main
from moe_lab.errors import LabError
from moe_lab.runs import Case, Run
from moe_lab.runs.columns import COLUMNS
from moe_lab_kernels.launch.table import Entry

MODEL = Path(__file__).resolve().parents[2] / "data" / "lab-42m.gguf"
FILE = ("bench", "--file", str(MODEL), "--layer", "3")


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main([*map(str, arguments)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_files_layer_as_json_and_as_a_saved_run(capsys, tmp_path: Path) -> None:
    code, out, _ = call(capsys, *FILE, "--tokens", "1,4", "--arms", "reference,gemv", "--save", tmp_path, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["command"], found["ok"]) == ("bench", True)
    assert list(found["rows"][0]) == [*COLUMNS, "source", "device"]
    cases = [(r["arm"], r["tokens"], r["state"], r["status"]) for r in found["rows"]]
    assert cases == [
        (arm, t, state, "PASSED") for t in (1, 4) for arm in ("reference", "gemv") for state in ("cold", "warm")
    ]
    assert {r["model"] for r in found["rows"]} == {"lab-42m layer 3"}
    assert {r["workload"] for r in found["rows"]} == {"rows recorded in activations.npz"}
    assert {r["method"].rpartition(" ")[2] for r in found["rows"] if r["state"] == "cold"} == {"8"}
    assert len(Run.load(next(tmp_path.iterdir())).records) == 8


def test_a_shape_as_a_table(capsys) -> None:
    code, out, _ = call(capsys, "bench", "--model", "lab-42m", "--formats", "q8_0", "--tokens", "1", "--device", "cpu")
    assert code == 0
    for word in ("lab-42m", "q8_0", "cold", "PASSED", "p50 us", "host clock", "device: "):
        assert word in out


def test_a_budget_too_short_is_a_note(capsys) -> None:
    more = ("--formats", "q8_0", "--tokens", "1", "--device", "cpu", "--budget-s", "1e-9")
    code, out, err = call(capsys, "bench", "--model", "lab-42m", *more)
    assert (code, err) == (0, "")
    assert "UserWarning: the budget of 1e-09 s left out 2 measurements" in " ".join(out.split())


def test_a_wrong_arm_is_exit_1(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_lab.arms import Gemv

    right = Gemv.experts
    monkeypatch.setattr(Gemv, "experts", lambda *step: (right(*step), step[5].mul_(1.1))[0])
    code, out, _ = call(capsys, *FILE, "--arms", "gemv", "--json")
    row = json.loads(out)["rows"][0]
    assert code == 1
    assert (row["status"], row["p50"]) == ("INCORRECT", None)


def test_tune_writes_the_table_it_names(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_LAB_CACHE", str(tmp_path / "cache"))
    code, out, _ = call(
        capsys, "bench", "--tune", "--model", "lab-42m", "--formats", "q8_0", "--tokens", "1", "--device", "cpu",
        "--table", tmp_path,
    )  # fmt: skip
    assert code == 0
    written = next(tmp_path.glob("*.json"))
    assert written.name in out.replace("\n", "")
    assert json.loads(written.read_text())["rows"][0]["tokens"] == 1
    assert "tiles of kernels were not tuned: on cpu none is compiled" in " ".join(out.split())


def test_tune_measures_tiles_before_arms_and_says_how_many(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_lab.cli import bench as command

    asked, entries = [], [Entry("grouped", "q2_k", 16, True, 8, 8, {}, us, 10.0) for us in (8.0, 10.0)]

    def tiles(device: str, **how):
        asked.append((device, how["budget_s"], how["folder"]))
        return entries, Path("tiles.json")

    def arms(device: str, **how):
        asked.append((device, how["settings"].budget_s, how["folder"]))
        raise LabError("stop here")

    monkeypatch.setattr(command, "tune_launches", tiles)
    assert command._tune_tiles(command.Asked(device="cuda", budget_s=60.0, table=Path("t"))) == (
        "kernels go by tiles.json: 2 tiles measured, 1 better than the built-in ones"
    )
    monkeypatch.setattr(command, "tune", arms)
    code, _, _ = call(capsys, "bench", "--tune", "--device", "cuda", "--budget-s", "60")
    assert code != 0
    assert asked[0] == ("cuda", 30.0, Path("t") / "launch")
    assert asked[1] == ("cuda", 30.0, None)
    assert asked[2][0] == "cuda"
    assert 30.0 <= asked[2][1] <= 60.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bench",), "wanted --file FILE or --model NAME"),
        (("bench", "--model", "x", "--file", "y"), "one of them"),
        (("bench", "--model", "qwen9"), "qwen9"),
        (("bench", "--model", "lab-42m", "--tokens", "many"), "--tokens many"),
        (("bench", "--model", "lab-42m", "--picks", "flat"), "--picks flat"),
        (("bench", "--model", "lab-42m", "--formats", "q9"), "q9"),
        (("bench", "--model", "lab-42m", "--budget-s", "0"), "budget_s=0"),
        (("bench", "--file", str(MODEL)), "--layer all: one layer is measured"),
        ((*FILE, "--formats", "q8_0"), "go with --model"),
        ((*FILE, "--arms", "magic"), "magic"),
        ((*FILE, "--table", "here"), "--table goes with --tune"),
        (("bench", "--tune", "--arms", "gemv"), "takes no --file and no --arms"),
        (("bench", "--file", "nowhere.gguf", "--layer", "0"), "nowhere.gguf"),
    ],
    ids=lambda v: " ".join(Path(a).name for a in v) if isinstance(v, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_2(capsys, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err


def frame(*, peers: bool = False) -> pd.DataFrame:
    """A measured case of the qwen3 shape: two arms right, one wrong; recorded rows after them on request."""
    head = {
        "what": "layer", "workload": "uniform", "model": "qwen3-30b-a3b", "d_model": 2048, "d_expert": 768,
        "experts": 128, "top_k": 8, "tokens": 8, "shared_arm": "", "format": "q2_k+q3_k", "backend": "cuda",
        "metric": "time", "unit": "ms", "error_measure": "NMSE", "method": "graph-replay", "reason": "",
        "source": "measured", "device": "a GPU",
    }  # fmt: skip
    times = {"n": 20, "p95": 0.09, "iqr": 0.01, "error": 1e-4, "predicted": 0.04}
    rows = [
        {**head, **times, "arm": arm, "state": state, "status": "PASSED", "p20": ms * 0.9, "p50": ms, "p80": ms * 1.2,
         "floor": 0.02 if state == "cold" else None}
        for arm, state, ms in (("gemv", "cold", 0.06), ("gemv", "warm", 0.05), ("reference", "cold", 0.6))
    ]  # fmt: skip
    rows.append({**head, "arm": "mine", "state": "", "status": "INCORRECT", "error": 0.3, "reason": "wrong"})
    made = pd.DataFrame(rows, columns=[*COLUMNS, "source", "device"])
    if not peers:
        return made
    case = Case(workload="uniform", model="qwen3-30b-a3b", d_model=2048, d_expert=768, experts=128, top_k=8, tokens=8)
    return pd.concat([made, pd.DataFrame(peer_rows([(case, "q2_k+q3_k")]), columns=made.columns).astype(made.dtypes)])


def test_the_figure_shows_times_floors_and_recorded_rows_and_no_speed_of_a_wrong_arm() -> None:
    axes = lab.plot.bench(frame(peers=True))
    labels = [t.get_text() for t in axes.get_yticklabels()]
    assert labels == ["gemv · cold", "gemv · warm", "reference · cold", "mine", "ggml-cuda (recorded)"]
    bars = [p for p in axes.patches if p.get_width() > 0]
    assert len(bars) == 4
    assert [bool(b.get_hatch()) for b in bars] == [False, True, False, True]
    ends = [b.get_x() + b.get_width() for b in bars]
    assert ends == pytest.approx([60.0, 50.0, 600.0, 141.0], abs=1)
    texts = [t.get_text().strip() for t in axes.texts]
    assert "INCORRECT" in texts
    assert "n = 20" in axes.get_xlabel()
    assert axes.get_title(loc="left") == "gemv is 10.0x faster than reference at T = 8 (a GPU)"
    assert "mine INCORRECT" in axes.figure.alt
    plt.close("all")


def test_the_figure_draws_on_given_axes_and_refuses_what_it_cannot_draw() -> None:
    axes = Figure().subplots()
    assert lab.plot.bench(frame(), ax=axes) is axes
    with pytest.raises(LabError, match="at most 48 rows"):
        lab.plot.bench(pd.concat([frame()] * 13))
    with pytest.raises(LabError, match="draws times"):
        lab.plot.bench(frame().assign(unit="GB/s"))
    with pytest.raises(LabError, match="needs the column"):
        lab.plot.bench(frame().drop(columns="floor"))
    nothing = frame().iloc[3:]
    assert "Nothing was timed" in lab.plot.bench(nothing).get_title(loc="left")
    plt.close("all")
