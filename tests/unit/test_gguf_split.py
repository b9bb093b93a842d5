"""Split GGUF models: any part opens all of them; parts that are missing or not of one model are refused."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from moe_lab.checkpoint import GgufFile, open_tensor_file
from moe_lab.errors import CheckpointError
from tests.support.descriptors import open_descriptors
from tests.support.tiny_gguf import entry, raw_gguf, tensor_row, text

U16, U32, I32, STRING = 2, 4, 5, 8
SPLIT_TYPES = {"split.no": (U16, "<H"), "split.count": (U16, "<H"), "split.tensors.count": (I32, "<i")}


def refusal(call: Callable[[], object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        call()
    return caught.value


def part(folder: Path, number: int, parts: int, *, name: str | None = None, tensor: str | None = None, **keys) -> Path:
    """One part by hand: `keys` replaces split.no, split.count (and adds tensors); None leaves a key out."""
    values = {"split.no": number, "split.count": parts}
    values |= {f"split.{key.replace('_', '.')}": value for key, value in keys.items() if key != "arch"}
    entries = [
        entry(key, SPLIT_TYPES[key][0], struct.pack(SPLIT_TYPES[key][1], value))
        for key, value in values.items()
        if value is not None
    ]
    if "arch" in keys:
        entries.append(entry("general.architecture", STRING, text(keys["arch"])))
    rows = (tensor_row(tensor or f"w{number}", (4,), 0, 0),)
    path = folder / (name or f"model-{number + 1:05d}-of-{parts:05d}.gguf")
    path.write_bytes(raw_gguf(tuple(entries), rows, np.full(4, number, np.float32).tobytes()))
    return path


@pytest.fixture
def written(tmp_path: Path) -> tuple[list[Path], dict[str, np.ndarray]]:
    """A model of seven tensors, split by the gguf package after every second one."""
    rng = np.random.default_rng(0)
    tensors = {f"blk.{i}.w": rng.standard_normal((3, 8 + i)).astype(np.float32) for i in range(7)}
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=2)
    writer.add_uint32("llama.block_count", 7)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("model-*.gguf")), tensors


class TestWhole:
    @pytest.mark.parametrize("given", range(4))
    def test_any_part_opens_all(self, written: tuple, given: int) -> None:
        paths, tensors = written
        assert len(paths) == 4
        with open_tensor_file(paths[given]) as file:
            assert file.path == paths[given]
            assert list(file.parts) == paths
            assert file.size == sum(path.stat().st_size for path in paths)
            assert set(file.tensors) == set(tensors)
            assert file.metadata["general.architecture"] == "llama"
            assert file.metadata["llama.block_count"] == 7
            for number, (name, values) in enumerate(tensors.items()):
                assert file.tensors[name].file == paths[number // 2]
                assert torch.equal(file.read(name), torch.from_numpy(values))
                assert file.raw(name).numpy().tobytes() == values.tobytes()

    def test_folder_with_one_split_model_opens_it(self, written: tuple) -> None:
        paths, tensors = written
        assert set(open_tensor_file(paths[0].parent).tensors) == set(tensors)

    def test_hash_is_the_same_from_every_part_and_tells_models_apart(self, written: tuple) -> None:
        paths, _ = written
        hashes = {GgufFile(path).model_hash for path in paths}
        assert len(hashes) == 1
        last = GgufFile(paths[0]).tensors["blk.6.w"]
        data = bytearray(paths[3].read_bytes())
        data[last.offset] ^= 1
        paths[3].write_bytes(data)
        assert GgufFile(paths[0]).model_hash not in hashes

    def test_one_part_of_one_is_a_plain_file(self, tmp_path: Path) -> None:
        path = part(tmp_path, 0, 1, name="renamed.gguf")
        assert GgufFile(path).metadata["split.count"] == 1

    def test_change_of_any_part_is_noticed(self, written: tuple) -> None:
        paths, _ = written
        file = GgufFile(paths[0])
        os.utime(paths[2], ns=(1, 1))
        assert refusal(file.check_unchanged).file == str(paths[2])
        assert refusal(lambda: file.read("blk.4.w")).reason == "changed"
        assert file.read("blk.0.w").shape == (3, 8)

    def test_closing_gives_every_descriptor_back(self, written: tuple) -> None:
        before = open_descriptors()
        GgufFile(written[0][0]).close()
        assert open_descriptors() == before


class TestRefusals:
    def test_missing_parts_are_listed_and_only_they(self, tmp_path: Path) -> None:
        first = part(tmp_path, 0, 4)
        part(tmp_path, 1, 4)
        error = refusal(lambda: GgufFile(first))
        assert error.reason == "missing part"
        assert "part 1 of 4" in str(error)
        assert "model-00003-of-00004.gguf, model-00004-of-00004.gguf" in str(error)
        assert "model-00002" not in str(error)

    def test_folder_with_a_parts_name_is_missing(self, tmp_path: Path) -> None:
        first = part(tmp_path, 0, 2)
        (tmp_path / "model-00002-of-00002.gguf").mkdir()
        error = refusal(lambda: GgufFile(first))
        assert (error.reason, "a folder has the name" in str(error)) == ("missing part", True)

    def test_renamed_part_says_what_names_it_wants(self, tmp_path: Path) -> None:
        error = refusal(lambda: GgufFile(part(tmp_path, 0, 2, name="big.gguf")))
        assert error.reason == "missing part"
        assert "-00001-of-00003.gguf" in str(error)

    @pytest.mark.parametrize(
        ("keys", "says"),
        [
            ({"no": 0}, "split.no 0"),
            ({"count": 3}, "split.no 1 of 3"),
            ({"count": None, "no": None}, "split.no None"),
            ({"tensors_count": 7}, "split.tensors.count 7"),
            ({"arch": "mamba"}, "'mamba'"),
        ],
        ids=["same-number", "other-count", "not-split", "other-total", "other-architecture"],
    )
    def test_parts_of_different_models(self, tmp_path: Path, keys: dict, says: str) -> None:
        first = part(tmp_path, 0, 2, arch="llama", tensors_count=2)
        part(tmp_path, 1, 2, **keys)
        error = refusal(lambda: GgufFile(first))
        assert error.reason == "part mismatch"
        assert says in str(error)
        assert "model-00002-of-00002.gguf" in error.file

    def test_promised_tensors_that_no_part_has(self, tmp_path: Path) -> None:
        first = part(tmp_path, 0, 2, tensors_count=3)
        part(tmp_path, 1, 2)
        error = refusal(lambda: GgufFile(first))
        assert (error.reason, "promises 3 tensors" in str(error)) == ("part mismatch", True)

    def test_name_that_contradicts_the_metadata(self, tmp_path: Path) -> None:
        path = part(tmp_path, 0, 2, name="model-00002-of-00002.gguf")
        error = refusal(lambda: GgufFile(path))
        assert (error.reason, "contradicts" in str(error)) == ("part mismatch", True)

    def test_tensor_in_two_parts(self, tmp_path: Path) -> None:
        first = part(tmp_path, 0, 2, tensor="w")
        part(tmp_path, 1, 2, tensor="w")
        error = refusal(lambda: GgufFile(first))
        assert (error.reason, error.tensor) == ("duplicate", "w")

    @pytest.mark.parametrize(("number", "count"), [(2, 2), (0, 65535), (7, 3)])
    def test_counts_that_cannot_be(self, tmp_path: Path, number: int, count: int) -> None:
        error = refusal(lambda: GgufFile(part(tmp_path, number, count)))
        assert error.reason == "part mismatch"
        assert str(count) in str(error)

    def test_broken_part_is_named_and_nothing_stays_open(self, written: tuple) -> None:
        paths, _ = written
        paths[2].write_bytes(paths[2].read_bytes()[:-40])  # the writer pads the end by up to 31 bytes
        before = open_descriptors()
        error = refusal(lambda: GgufFile(paths[0]))
        assert (error.reason, error.file, error.tensor) == ("truncated", str(paths[2]), "blk.5.w")
        assert open_descriptors() == before

    def test_part_behind_a_link_out_of_the_folder(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        first = part(tmp_path / "model", 0, 2)
        elsewhere = part(tmp_path, 1, 2)
        (tmp_path / "model" / elsewhere.name).symlink_to(elsewhere)
        error = refusal(lambda: GgufFile(first))
        assert (error.reason, elsewhere.name in error.file) == ("path", True)

    def test_folder_with_two_models_asks_which(self, tmp_path: Path) -> None:
        part(tmp_path, 0, 1, name="a.gguf")
        part(tmp_path, 0, 1, name="b.gguf")
        error = refusal(lambda: open_tensor_file(tmp_path))
        assert error.reason == "missing part"
        assert "'a.gguf', 'b.gguf'" in str(error)
