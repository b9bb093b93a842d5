"""SafetensorsFile on single files: what the safetensors package writes is read bit for bit, the impossible refused."""

import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from moe_lab.checkpoint import SafetensorsFile, open_tensor_file
from moe_lab.checkpoint.plain_types import PLAIN, SAFETENSORS_TYPES
from moe_lab.checkpoint.safetensors_header import MAX_HEADER_BYTES
from moe_lab.errors import CheckpointError

WRITTEN = [name for name in PLAIN if name not in ("f8_e4m3fnuz", "f8_e5m2fnuz")]  # the package has no word for these
ROOM = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def refusal(call: Callable[[], object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        call()
    return caught.value


def raw_file(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file from a header (bytes as they are, anything else as JSON) and its data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, np.uint8))


class TestReading:
    @pytest.mark.parametrize("name", WRITTEN)
    def test_every_dtype_comes_back_bit_for_bit(self, tmp_path: Path, name: str) -> None:
        dtype = PLAIN[name]
        bits = random_bytes(3 * 5 * dtype.itemsize) & (1 if name == "bool" else 255)
        stored = bits.view(dtype).reshape(3, 5)
        path = tmp_path / "one.safetensors"
        path.write_bytes(save({"w": stored}))
        with open_tensor_file(path) as file:
            info, read = file.tensors["w"], file.read("w")
            assert (info.format, info.dtype, info.shape, info.nbytes) == (name, name.upper(), (3, 5), bits.numel())
            assert (info.file, info.ggml_type) == (path, None)
            assert path.read_bytes()[info.offset :][: bits.numel()] == bits.numpy().tobytes()
            assert read.dtype == dtype
            assert torch.equal(read.reshape(-1).view(torch.uint8), bits)
            assert torch.equal(file.raw("w"), bits)

    def test_scalars_and_empty_tensors(self, tmp_path: Path) -> None:
        stored = {
            "s": torch.tensor(2.5),
            "none": torch.empty(0, 3),
            "after": torch.arange(3),
            "last": torch.empty(2, 0),
        }
        path = tmp_path / "small.safetensors"
        save_file(stored, path)
        file = SafetensorsFile(path)
        assert all(torch.equal(file.read(name), t) and file.read(name).shape == t.shape for name, t in stored.items())

    def test_metadata_and_config_come_along(self, tmp_path: Path) -> None:
        save_file({"w": torch.zeros(1)}, tmp_path / "m.safetensors", metadata={"format": "pt", "ü": "\n"})
        assert SafetensorsFile(tmp_path / "m.safetensors").config == {}
        (tmp_path / "config.json").write_text('{"model_type": "mixtral", "num_local_experts": 8}')
        file = SafetensorsFile(tmp_path / "m.safetensors")
        assert file.metadata == {"format": "pt", "ü": "\n"}
        assert file.config == {"model_type": "mixtral", "num_local_experts": 8}

    def test_f4_counts_elements_and_gives_its_bytes(self, tmp_path: Path) -> None:
        entry = {"w": {"dtype": "F4", "shape": [2, 6], "data_offsets": [0, 6]}}
        file = SafetensorsFile(raw_file(tmp_path / "f4.safetensors", entry, b"abcdef"))
        assert file.tensors["w"].nbytes == 6
        error = refusal(lambda: file.read("w"))
        assert (error.reason, error.tensor, "F4" in str(error)) == ("dtype", "w", True)
        assert file.raw("w").numpy().tobytes() == b"abcdef"

    def test_bool_that_is_neither(self, tmp_path: Path) -> None:
        entry = {"b": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}}
        error = refusal(lambda: SafetensorsFile(raw_file(tmp_path / "b.safetensors", entry, b"\1\2")).read("b"))
        assert (error.reason, error.tensor) == ("value", "b")

    def test_opening_reads_the_header_alone(self, tmp_path: Path) -> None:
        asked: list[int] = []

        def counted(fd: int, views: Sequence[memoryview], offset: int) -> int:
            asked.append(sum(len(view) for view in views))
            return os.preadv(fd, views, offset)

        save_file({f"w{i}": torch.zeros(1 << 18) for i in range(8)}, tmp_path / "big.safetensors")
        file = SafetensorsFile(tmp_path / "big.safetensors", read_call=counted)
        assert sum(asked) < 2048
        asked.clear()
        file.raw("w3")
        assert asked == [4 << 18]

    def test_short_reads_are_put_together(self, tmp_path: Path) -> None:
        def seven_bytes(fd: int, views: Sequence[memoryview], offset: int) -> int:
            return os.preadv(fd, [views[0][:7]], offset)

        stored = random_bytes(96).view(torch.float32)
        save_file({"w": stored}, tmp_path / "m.safetensors")
        file = SafetensorsFile(tmp_path / "m.safetensors", read_call=seven_bytes)
        assert torch.equal(file.raw("w"), stored.view(torch.uint8))

    def test_unknown_name_has_close_ones(self, tmp_path: Path) -> None:
        save_file({"model.layers.0.mlp.gate.weight": torch.zeros(1)}, tmp_path / "m.safetensors")
        error = refusal(lambda: SafetensorsFile(tmp_path / "m.safetensors").read("model.layers.0.mlp.gates.weight"))
        assert (error.reason, "mlp.gate.weight" in str(error)) == ("missing tensor", True)

    def test_hash_is_of_the_contents(self, tmp_path: Path) -> None:
        weights = {"a": torch.arange(4096.0), "b": torch.ones(3)}
        hashes = []
        for name, change in (("1", 0), ("2", 0), ("3", 1)):
            save_file({**weights, "b": weights["b"] + change}, tmp_path / f"{name}.safetensors")
            hashes.append(SafetensorsFile(tmp_path / f"{name}.safetensors").model_hash)
        assert hashes[0] == hashes[1] != hashes[2]

    def test_change_after_opening_is_noticed(self, tmp_path: Path) -> None:
        path = tmp_path / "m.safetensors"
        save_file({"w": torch.zeros(4)}, path)
        file = SafetensorsFile(path)
        os.utime(path, ns=(1, 1))
        assert refusal(lambda: file.read("w")).reason == "changed"

    def test_blob_without_a_suffix_is_recognised(self, tmp_path: Path) -> None:
        save_file({"w": torch.ones(4)}, tmp_path / "0f3a")
        assert open_tensor_file(tmp_path / "0f3a").kind == "safetensors"


class TestHeader:
    @pytest.mark.parametrize("size", [0, 3, 8, 9])
    def test_short_files(self, tmp_path: Path, size: int) -> None:
        path = tmp_path / "short.safetensors"
        path.write_bytes((struct.pack("<Q", 2) + b"{}")[:size])
        assert refusal(lambda: SafetensorsFile(path)).reason == "header length"

    def test_file_without_tensors_opens(self, tmp_path: Path) -> None:
        assert not SafetensorsFile(raw_file(tmp_path / "none.safetensors", {})).tensors

    def test_header_beyond_the_limit_is_not_read(self, tmp_path: Path) -> None:
        path = raw_file(tmp_path / "big.safetensors", b"{", length=MAX_HEADER_BYTES + 1)
        os.truncate(path, 3 * MAX_HEADER_BYTES)
        error = refusal(lambda: SafetensorsFile(path))
        assert (error.reason, str(MAX_HEADER_BYTES) in str(error)) == ("header length", True)

    @pytest.mark.parametrize(
        "text",
        [
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
            b'{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}',
            b' {"a":1}', b"[1]", b"{}x", b'{"a":}', b'{"a":NaN}', b'{"\\ud800":1}', b'{"a\xff":1}',
            b'{"a":' + b"[" * 40 + b"]" * 40 + b"}", b'{"a":' + b"9" * 5000 + b"}", b'{"":1}',
            b'{"a":[]}', b'{"a":{"dtype":"U8","shape":[0]}}', b'{"__metadata__":{"a":1}}', b'{"__metadata__":[]}',
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"strides":[1]}}',
            b'{"' + b"n" * 1025 + b'":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        ],
        ids=[
            "name-twice", "field-twice", "space-first", "list", "rest", "cut-value", "nan", "half-character",
            "not-utf8", "deep", "long-number", "no-name", "entry-a-list", "field-missing", "metadata-number",
            "metadata-list", "field-unknown", "long-name",
        ],
    )  # fmt: skip
    def test_texts_that_are_no_header(self, tmp_path: Path, text: bytes) -> None:
        error = refusal(lambda: SafetensorsFile(raw_file(tmp_path / "bad.safetensors", text)))
        assert error.reason == "header text"
        assert "\n" not in str(error)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"dtype": "F9"}, "dtype"), ({"dtype": 3}, "dtype"), ({"dtype": "f32"}, "dtype"),
            ({"shape": 4}, "shape"), ({"shape": [True, 4]}, "shape"), ({"shape": ["4"]}, "shape"),
            ({"shape": [1 << 63]}, "shape"), ({"shape": [1] * 65}, "shape"), ({"shape": [-1, -4]}, "shape"),
            ({"shape": [3]}, "size"), ({"shape": [5]}, "size"), ({"shape": []}, "size"), ({"shape": [0]}, "size"),
            ({"dtype": "F4", "shape": [7]}, "shape"), ({"dtype": "F4", "shape": [6]}, "size"),
            ({"data_offsets": [0]}, "offset"), ({"data_offsets": [0, 4, 8]}, "offset"),
            ({"data_offsets": [0.0, 4]}, "offset"), ({"data_offsets": [False, 4]}, "offset"),
            ({"data_offsets": [4, 0]}, "offset"), ({"data_offsets": [-4, 0]}, "offset"),
            ({"data_offsets": [1, 5]}, "offset"), ({"data_offsets": [1 << 64, (1 << 64) + 4]}, "offset"),
        ],
        ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else value,
    )  # fmt: skip
    def test_entries_that_do_not_add_up(self, tmp_path: Path, change: dict[str, Any], reason: str) -> None:
        path = raw_file(tmp_path / "bad.safetensors", {"w": {**ROOM, **change}}, b"1234")
        error = refusal(lambda: SafetensorsFile(path))
        assert (error.reason, error.tensor) == (reason, "w")

    @pytest.mark.parametrize(
        ("places", "reason"),
        [
            ([(0, 4), (4, 8)], None), ([(4, 8), (0, 4)], None), ([(0, 4), (4, 4), (4, 8)], None),
            ([(0, 4), (3, 8)], "overlap"), ([(0, 8), (2, 2)], "overlap"), ([(0, 4), (0, 8)], "overlap"),
            ([(0, 4), (5, 8)], "hole in the data"), ([(1, 8)], "hole in the data"), ([(0, 4), (4, 7)], "size"),
        ],
    )  # fmt: skip
    def test_tensors_tile_the_data(self, tmp_path: Path, places: list[tuple[int, int]], reason: str | None) -> None:
        header = {
            f"t{i}": {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
            for i, (begin, end) in enumerate(places)
        }
        path = raw_file(tmp_path / "tiles.safetensors", header, b"12345678")
        if reason is not None:
            assert refusal(lambda: SafetensorsFile(path)).reason == reason
            return
        file = SafetensorsFile(path)
        assert [file.raw(f"t{i}").numpy().tobytes() for i in range(len(places))] == [
            b"12345678"[begin:end] for begin, end in places
        ]

    @pytest.mark.parametrize("kind", ["GGUF", "zip", "pickle"])
    def test_other_files_are_called_by_their_kind(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes({"GGUF": b"GGUF\3\0\0\0", "zip": b"PK\3\4", "pickle": b"\x80\x02"}[kind] + b"\xff" * 60)
        error = refusal(lambda: SafetensorsFile(path))
        assert (error.reason, kind in str(error)) == ("header length", True)


def test_bits_agree_with_torch() -> None:
    for name, kind in SAFETENSORS_TYPES.items():
        assert kind.torch is None or kind.bits == 8 * kind.torch.itemsize, name
