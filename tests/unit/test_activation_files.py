"""Recorded activations: written, read back, and imported from safetensors."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_lab.activations import Activations, Inputs
from moe_lab.errors import LabError

st = pytest.importorskip("safetensors.torch")

X = torch.arange(24, dtype=torch.float16).reshape(2, 3, 4)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    a = Activations(
        X.numpy(), (3, 5), np.array([7, 8, 9], np.int32), np.array(["a", "b", "b"]), source="me/model", model_hash="ab"
    )
    back = Activations.load(a.save(tmp_path / "a.npz"))
    assert back.x.dtype == np.float16
    for name in ("x", "token_ids", "domains"):
        assert np.array_equal(getattr(back, name), getattr(a, name)), name
    assert (back.layers, back.source, back.model_hash, back.synthetic) == ((3, 5), "me/model", "ab", False)
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]
    bare = Activations.load(Activations(X.numpy(), (0, 1)).save(tmp_path / "b.npz"))
    assert (bare.token_ids, bare.domains, bare.source) == (None, None, "")
    with pytest.raises(LabError, match="written as npz"):
        a.save(tmp_path / "a.bin")


def test_safetensors_with_x(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    more = {"layers": torch.tensor([4, 2]), "token_ids": torch.tensor([1, 2, 3])}
    st.save_file({"x": X, **more}, path, metadata={"source": "me/model"})
    a = Activations.load(path)
    assert (a.layers, a.source, a.x.dtype) == ((4, 2), "me/model", np.float16)
    assert torch.equal(a.layer(2), X[1].float())
    assert Inputs(tmp_path / "m.gguf", 4, 2, path).layer(4).tolist() == X[0, :2].tolist()


@pytest.mark.parametrize(
    "names",
    [
        {10: "layers.10", 2: "layers.2"},
        {10: "model.layers.10.mlp.input", 2: "model.layers.2.mlp.input"},
        {10: "blk10", 2: "blk2"},
        {10: "h2o/10/x", 2: "h2o/2/x"},
    ],
    ids=lambda n: n[10],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_safetensors_with_a_tensor_a_layer(names, dtype: torch.dtype, tmp_path: Path) -> None:
    st.save_file(
        {name: X[i].to(dtype).contiguous() for i, name in enumerate(names.values())}, tmp_path / "a.safetensors"
    )
    a = Activations.load(tmp_path / "a.safetensors")
    assert a.layers == (2, 10)
    assert a.x.dtype == (np.float16 if dtype == torch.float16 else np.float32)
    assert torch.equal(a.layer(10), X[0].float())


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"y": X}, "tensor y (float16 (2, 3, 4))"),
        ({"layer.weights": X[0]}, "layer.weights"),
        ({"layers.1.experts.2": X[0]}, "layers.1.experts.2"),
        ({"layers.1": X[0].int()}, "layers.1 (int32"),
        ({"layers.1": X[0], "blk.1": X[1]}, "both of layer 1"),
        ({"layers.1": X[0], "layers.2": X[1, :2]}, "same [T, D]"),
        ({"x": X[0]}, "float16 (3, 4)"),
        ({"x": X.int()}, "int32"),
        ({"x": X, "token_ids": torch.tensor([1])}, "token_ids"),
        ({}, "no activations"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_safetensors_that_hold_something_else(tensors, words: str, tmp_path: Path) -> None:
    st.save_file({name: t.clone() for name, t in tensors.items()}, tmp_path / "a.safetensors")
    with pytest.raises(LabError) as refused:
        Activations.load(tmp_path / "a.safetensors")
    assert words in str(refused.value)
    assert "a.safetensors" in str(refused.value)


def test_safetensors_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 64)
    (tmp_path / "b.safetensors").mkdir()
    for name in ("a", "b", "c"):
        with pytest.raises(LabError, match=rf"{name}\.safetensors"):
            Activations.load(tmp_path / f"{name}.safetensors")
