"""The GGUF writer: the shipped model comes out byte for byte, every format comes back, what cannot be is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

import moe_lab as lab
from moe_lab.checkpoint.gguf_writer import write_gguf_tensors

pytest.importorskip("gguf")
MODEL = Path(__file__).resolve().parents[2] / "data" / "lab-42m.gguf"
GGML = [name for name, codec in lab.FORMATS.items() if codec.ggml_type is not None]


def test_the_shipped_model_read_and_written_again_is_the_same_file(tmp_path: Path) -> None:
    with lab.open(MODEL) as ckpt:
        tensors = {name: ckpt.read(name) for name in ckpt.tensors}
        metadata = {key: value for key, value in ckpt.metadata.items() if key != "general.architecture"}
        path = write_gguf_tensors(tmp_path / "again.gguf", "qwen2moe", tensors, metadata)
    assert path.read_bytes() == MODEL.read_bytes()


@pytest.mark.parametrize("name", GGML)
def test_raw_blocks_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    codec = lab.FORMATS[name]
    rng = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (2, 3, codec.row_bytes(256)), dtype=torch.uint8, generator=rng)
    w = lab.QuantTensor.from_bytes(data, name, (2, 3, 256))
    with lab.open(write_gguf_tensors(tmp_path / "x.gguf", "any", {"w": w})) as ckpt:
        info = ckpt.tensors["w"]
        assert (info.format, info.shape) == (name, (2, 3, 256))
        assert torch.equal(ckpt.raw("w"), data.reshape(-1))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64"])
def test_plain_dtypes_keep_shape_and_values(dtype: str, tmp_path: Path) -> None:
    """BF16 has no numpy type and goes in as bytes: its last axis must not come back doubled."""
    t = torch.arange(-16, 16).reshape(4, 8).to(getattr(torch, dtype))
    with lab.open(write_gguf_tensors(tmp_path / "x.gguf", "any", {"w": t})) as ckpt:
        back = ckpt.read("w")
        assert isinstance(back, torch.Tensor)
        assert (back.dtype, back.shape) == (t.dtype, (4, 8))
        assert torch.equal(back, t)


def test_metadata_keep_their_kinds(tmp_path: Path) -> None:
    metadata = {
        "a.flag": True, "a.small": 7, "a.below": -7, "a.large": 2**40, "a.far_below": -(2**40), "a.share": 0.5,
        "a.text": "ü", "a.list": [1, 2, 3], "a.words": ["x", "y"],
    }  # fmt: skip
    with lab.open(write_gguf_tensors(tmp_path / "x.gguf", "any", {"w": torch.zeros(1)}, metadata)) as ckpt:
        assert {key: ckpt.metadata[key] for key in metadata} == metadata
        assert {key: type(ckpt.metadata[key]) for key in metadata} == {key: type(v) for key, v in metadata.items()}


@pytest.mark.parametrize(
    ("tensor", "metadata", "said"),
    [
        (torch.zeros(2, dtype=torch.complex64), {}, "complex64"),
        ("text", {}, "str"),
        (torch.zeros(2), {"a": {}}, "dict"),
        (torch.zeros(2), {"a": []}, "list"),
        (torch.zeros(2), {"a": [1, "b"]}, "list"),
        (torch.zeros(2), {"a": 2**64}, "18446744073709551616"),
    ],
    ids=["complex", "no-tensor", "dict", "empty-list", "mixed-list", "too-large"],
)
@pytest.mark.wrong_types
def test_what_a_gguf_cannot_hold_leaves_the_old_file(tensor: Any, metadata: dict, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"old")
    with pytest.raises(lab.LabError, match=said):
        write_gguf_tensors(path, "any", {"w": tensor}, metadata)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_format_without_a_type_of_ggml_is_refused_by_name(tmp_path: Path) -> None:
    w = lab.quantize(torch.ones(4, 64), "int4_g64")
    with pytest.raises(lab.LabError, match="'w' is int4_g64"):
        write_gguf_tensors(tmp_path / "x.gguf", "any", {"w": w})
