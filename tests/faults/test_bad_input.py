"""Bad input to the library and the command line: one clear error, nothing lost, nothing hangs."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import moe_lab as lab
from moe_lab.activations import Activations
from moe_lab.cli import main
from moe_lab.errors import CheckpointError, LabError, LabTypeError
from moe_lab.formats.base import BlockFormat
from moe_lab.formats.legacy import Q8_0_FORMAT
from moe_lab.layer import MoELayer
from moe_lab.spec import MoESpec, RouterSpec
from moe_lab.system.files import replace_file
from tests.support.tiny_gguf import write_tiny_qwen2moe


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_qwen2moe(tmp_path / "tiny.gguf")


def test_experts_overwritten_in_the_open_file_are_not_computed_with(model: Path) -> None:
    ckpt = lab.open(model)
    with lab.ExpertCache(slots=2) as cache:
        layer = ckpt.layer(0, cache=cache)
        where = ckpt.tensors["blk.0.ffn_gate_exps.weight"]
        with model.open("r+b") as file:
            file.seek(where.offset)
            file.write(b"\x55" * (where.nbytes or 0))
        os.utime(model, ns=(1, 1))
        with pytest.raises(CheckpointError, match=r"tiny\.gguf.*changed"):
            layer(torch.randn(4, 256), "gemv")


def test_a_failed_write_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_text("good")

    def fill(part: Path) -> None:
        part.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(LabError, match=r"t\.parquet: No space left"):
        replace_file(path, fill)
    assert path.read_text() == "good"
    assert os.listdir(tmp_path) == ["t.parquet"]
    with pytest.raises(LabError, match="not a regular file"):
        replace_file("/dev/null", fill)


def bad_npz(kind: str, path: Path) -> Path:
    x = np.zeros((2, 3, 4), np.float16)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "bare_array":
        with path.open("wb") as file:
            np.save(file, x)
    elif kind == "no_arrays":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("x.npy", b"\x93NUMPY")
    else:
        layers = {"nan": [np.nan, 1], "text": ["a", "b"], "scalar": 3, "twice": [0, 0], "short": [0]}[kind]
        np.savez(path, x=x, layers=layers)
    return path


@pytest.mark.parametrize("kind", ["fifo", "bare_array", "no_arrays", "nan", "text", "scalar", "twice", "short"])
def test_what_is_no_activations_file(kind: str, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"a\.npz"):
        Activations.load(bad_npz(kind, tmp_path / "a.npz"))


def test_an_own_format_takes_the_reference_and_is_refused_elsewhere() -> None:
    class Mine(BlockFormat):
        name, block, block_bytes = "mine", Q8_0_FORMAT.block, Q8_0_FORMAT.block_bytes

        def dequantize(self, raw: torch.Tensor) -> torch.Tensor:
            return Q8_0_FORMAT.dequantize(raw)

        def quantize(self, w: torch.Tensor) -> torch.Tensor:
            return Q8_0_FORMAT.quantize(w)

    w = torch.randn(2, 256, 256)
    stack = lab.quantize(w, Mine())
    layer = MoELayer.from_tensors(
        MoESpec(RouterSpec(2, 1), 256, 256), router=torch.randn(2, 256), gate=stack, up=stack, down=stack
    )
    assert layer(torch.randn(3, 256)).arm == "reference"
    with pytest.raises(LabError, match=r"gemv.*mine"):
        layer(torch.randn(3, 256), "gemv")


def test_a_cache_says_that_it_does_not_survive_a_fork(model: Path) -> None:
    ckpt = lab.open(model)
    with lab.ExpertCache(slots=4) as cache:
        layer = ckpt.layer(0, cache=cache)
        layer(torch.randn(1, 256), "reference")
        child = os.fork()
        if child == 0:
            try:
                layer(torch.randn(1, 256), "reference")
            except LabError as error:
                os._exit(7 if "fork" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_simulated_cache_larger_than_everything_costs_nothing() -> None:
    ids = np.random.default_rng(0).integers(0, 8, (50, 2, 2))
    table = lab.simulate(ids, 10**12, policies=["lru", "belady"])
    assert table.capacity_slots.tolist() == [10**12] * len(table)
    assert (table.groupby("policy").misses.sum() == 16).all()


def test_nan_rows_that_are_the_same_bits_are_equal(model: Path) -> None:
    layer = lab.open(model).layer(0)
    x = torch.randn(3, 256)
    x[1] = float("nan")
    report = lab.compare(layer, x, ["gemv", "per_token"])
    assert bool(report.table.bit_equal[0])
    assert report.first_difference is None


def test_rows_that_require_gradients_run(model: Path) -> None:
    x = torch.randn(2, 256, requires_grad=True)
    assert not lab.open(model).layer(0)(x, "gemv").out.requires_grad


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m(np.zeros((2, 256), np.float32)),
        lambda m: m(None),
        lambda m: m(torch.zeros(1, 256), options={"stores": "fp32"}),
        lambda m: m(torch.zeros(1, 256), routing="x"),
    ],
    ids=["numpy", "none", "options", "routing"],
)
def test_wrong_types_are_named(call, model: Path) -> None:
    with pytest.raises(LabTypeError, match=r"ndarray|NoneType|dict|str"):
        call(lab.open(model).layer(0))


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "{model}", "--layer", "²"),
        ("run", "{model}", "--cache-gib", "1e300"),
        ("inspect", "{model}", "--gib", "inf"),
        ("run", "{model}", "--tokens", "99999999999999999999"),
        ("run", "{model}", "--tokens", "1000000000000"),
        ("report", "--out", "{folder}"),
    ],
    ids=lambda a: " ".join(a),
)
def test_the_command_line_answers_in_one_line(arguments, model: Path, capsys) -> None:
    code = main([a.format(model=model, folder=model.parent) for a in arguments])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.count("\n") == 1


def test_a_report_whose_claim_fails_on_a_users_model_answers_no(model: Path, tmp_path: Path, capsys) -> None:
    # Noise picks its experts evenly: the tour's claim on a quarter of them does not hold for this model.
    code = main(["report", "--model", str(model.parent), "--out", str(tmp_path / "page.html")])
    captured = capsys.readouterr()
    assert (code, captured.err) == (1, "")
    assert "a claim fails" in captured.out


def test_brackets_in_a_path_are_a_path(tmp_path: Path, capsys) -> None:
    odd = tmp_path / "[red]"
    odd.mkdir()
    path = write_tiny_qwen2moe(odd / "x].gguf")
    assert main(["inspect", str(path)]) == 0
    assert "[red]/x].gguf" in "".join(capsys.readouterr().out.split("\n"))
    assert main(["doctor"]) == 0
