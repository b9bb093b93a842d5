"""Folders of safetensors: shards under an index, links, config.json, and which file of a folder is the model."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moe_lab.checkpoint import SafetensorsFile, open_tensor_file
from moe_lab.errors import CheckpointError
from tests.support.descriptors import open_descriptors

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def refusal(call: Callable[[], object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        call()
    return caught.value


def weights() -> dict[str, torch.Tensor]:
    return {name: torch.full((2, 3), float(n)) for n, name in enumerate(("l.0.a", "l.0.b", "l.1.a", "l.1.b"))}


def write_index(folder: Path, weight_map: Any, **more: Any) -> Path:
    path = folder / INDEX
    path.write_text(json.dumps({"metadata": {"total_size": 96}, "weight_map": weight_map, **more}))
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder of two shards with two tensors each."""
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = weights()
    for shard, layer in zip(SHARDS, ("l.0.", "l.1."), strict=True):
        save_file({name: t for name, t in tensors.items() if name.startswith(layer)}, folder / shard)
    write_index(folder, {name: SHARDS[int(name[2])] for name in tensors})
    return folder


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


class TestShards:
    @pytest.mark.parametrize("given", ["folder", "index"])
    def test_tensors_come_from_their_shards(self, sharded: Path, given: str) -> None:
        with open_tensor_file(sharded if given == "folder" else sharded / INDEX) as file:
            assert file.kind == "safetensors"
            assert file.size == sum((sharded / shard).stat().st_size for shard in SHARDS)
            for name, values in weights().items():
                assert file.tensors[name].file == sharded / SHARDS[int(name[2])]
                assert torch.equal(file.read(name), values)

    def test_one_shard_opens_alone(self, sharded: Path) -> None:
        assert set(open_tensor_file(sharded / SHARDS[1]).tensors) == {"l.1.a", "l.1.b"}

    def test_tensor_that_the_index_forgot_is_there(self, sharded: Path) -> None:
        write_index(sharded, {name: part for name, part in index_of(sharded).items() if name != "l.1.b"})
        assert torch.equal(open_tensor_file(sharded).read("l.1.b"), weights()["l.1.b"])

    def test_the_index_chooses_between_two_of_a_name(self, sharded: Path) -> None:
        save_file({"l.0.a": torch.zeros(1), "l.1.a": torch.ones(1), "l.1.b": torch.ones(1)}, sharded / SHARDS[1])
        assert torch.equal(open_tensor_file(sharded).read("l.0.a"), weights()["l.0.a"])

    def test_two_of_a_name_without_a_choice(self, sharded: Path) -> None:
        for number, shard in enumerate(SHARDS):
            save_file({f"l.{number}.a": torch.zeros(1), "x": torch.ones(1)}, sharded / shard)
        write_index(sharded, {f"l.{number}.a": shard for number, shard in enumerate(SHARDS)})
        error = refusal(lambda: open_tensor_file(sharded))
        assert (error.reason, error.tensor) == ("duplicate", "x")

    def test_index_and_shard_disagree(self, sharded: Path) -> None:
        write_index(sharded, index_of(sharded) | {"l.9.z": SHARDS[0]})
        error = refusal(lambda: open_tensor_file(sharded))
        assert (error.reason, error.tensor, SHARDS[0] in str(error)) == ("missing tensor", "l.9.z", True)

    def test_all_missing_shards_are_listed_before_any_is_read(self, sharded: Path) -> None:
        (sharded / SHARDS[0]).write_bytes(b"broken")
        more = {f"m.{n}": f"extra-{n}.safetensors" for n in range(6)}
        write_index(sharded, index_of(sharded) | more)
        error = refusal(lambda: open_tensor_file(sharded))
        assert error.reason == "missing part"
        assert "extra-0.safetensors, extra-1.safetensors" in str(error)
        assert "and 2 more" in str(error)

    def test_broken_shard_is_named_and_nothing_stays_open(self, sharded: Path) -> None:
        os.truncate(sharded / SHARDS[1], (sharded / SHARDS[1]).stat().st_size - 1)
        before = open_descriptors()
        error = refusal(lambda: open_tensor_file(sharded))
        assert (error.reason, error.file, error.tensor) == ("offset", str(sharded / SHARDS[1]), "l.1.b")
        assert open_descriptors() == before

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "config"), ("[]", "config"), ("{}", "config"), ('{"weight_map": []}', "config"),
            ('{"weight_map": {"a": 1}}', "config"), ('{"weight_map": {}}', "missing part"),
            ('{"weight_map": {"a": "x", "a": "y"}}', "config"), ('{"weight_map": {"a": "\xff"', "config"),
            ('{"weight_map": ' + "[" * 5000 + "]" * 5000 + "}", "config"),
        ],
        ids=["empty", "list", "nothing", "map-a-list", "map-to-number", "map-empty", "twice", "cut", "deep"],
    )  # fmt: skip
    def test_index_that_is_none(self, sharded: Path, text: str, reason: str) -> None:
        (sharded / INDEX).write_bytes(text.encode("latin-1"))
        error = refusal(lambda: open_tensor_file(sharded))
        assert (error.reason, error.file) == (reason, str(sharded / INDEX))


class TestPaths:
    @pytest.mark.parametrize(
        "name",
        [
            "../model-x", "/etc/hostname", "a/../../x", "..", ".", "", "..\\x", "C:\\x", "C:x", "a\0b", "./../x",
            "a/..", "//host/x", "./x", "a//b",
            "a\nb", "a\x1b[31m",
        ],
    )  # fmt: skip
    def test_names_that_leave_the_folder(self, sharded: Path, name: str) -> None:
        write_index(sharded, index_of(sharded) | {"l.0.a": name})
        error = refusal(lambda: open_tensor_file(sharded))
        assert (error.reason, error.file) == ("path", str(sharded / INDEX))

    @pytest.mark.parametrize("length", [256, 5000])
    def test_names_too_long_for_a_file_are_missing(self, sharded: Path, length: int) -> None:
        write_index(sharded, index_of(sharded) | {"l.0.a": "n" * length})
        assert refusal(lambda: open_tensor_file(sharded)).reason == "missing part"
        assert refusal(lambda: open_tensor_file(sharded / ("n" * length))).reason == "unreadable"

    def test_two_links_to_one_file(self, sharded: Path) -> None:
        """As text, since real links keep their own names. One file is open twice and given back twice."""
        entry = sharded.parent / "models--a--b"
        (entry / "blobs").mkdir(parents=True)
        save_file(weights(), entry / "blobs" / "00")
        snapshot = entry / "snapshots" / "1"
        snapshot.mkdir(parents=True)
        for shard in SHARDS:
            (snapshot / shard).write_text("../../blobs/00")
        write_index(snapshot, index_of(sharded))
        with open_tensor_file(snapshot) as file:
            assert len(file.model_hash) == 64
            assert all(torch.equal(file.read(name), values) for name, values in weights().items())

    @pytest.mark.parametrize("name", ["model.safetensors", INDEX, "m.gguf"])
    def test_the_model_itself_behind_a_link_out_of_the_folder(self, sharded: Path, name: str) -> None:
        other = sharded.parent / "other"
        other.mkdir()
        (other / name).symlink_to(sharded / SHARDS[0])
        assert refusal(lambda: open_tensor_file(other)).reason == "path"

    def test_shards_in_a_folder_below(self, sharded: Path) -> None:
        (sharded / "below").mkdir()
        (sharded / SHARDS[1]).rename(sharded / "below" / SHARDS[1])
        write_index(sharded, {n: p if "00001" in p else f"below/{p}" for n, p in index_of(sharded).items()})
        assert set(open_tensor_file(sharded).tensors) == set(weights())

    @pytest.mark.parametrize("kind", ["file", "folder"])
    def test_link_that_leaves_the_folder(self, sharded: Path, kind: str) -> None:
        outside = sharded.parent / "outside"
        outside.mkdir()
        (sharded / SHARDS[1]).rename(outside / SHARDS[1])
        if kind == "file":
            (sharded / SHARDS[1]).symlink_to(outside / SHARDS[1])
        else:
            (sharded / "sub").symlink_to(outside)
            write_index(sharded, {n: p if "00001" in p else f"sub/{p}" for n, p in index_of(sharded).items()})
        error = refusal(lambda: open_tensor_file(sharded))
        assert (error.reason, SHARDS[1] in error.file) == ("path", True)

    def test_link_inside_the_folder(self, sharded: Path) -> None:
        (sharded / SHARDS[1]).rename(sharded / "real.bin")
        (sharded / SHARDS[1]).symlink_to("real.bin")
        assert set(open_tensor_file(sharded).tensors) == set(weights())

    def test_link_to_nothing_is_missing(self, sharded: Path) -> None:
        (sharded / SHARDS[1]).unlink()
        (sharded / SHARDS[1]).symlink_to("gone")
        error = refusal(lambda: open_tensor_file(sharded))
        assert (error.reason, "link to nothing" in str(error)) == ("missing part", True)

    def test_link_in_a_circle_is_missing(self, sharded: Path) -> None:
        (sharded / SHARDS[1]).unlink()
        (sharded / SHARDS[1]).symlink_to(SHARDS[1])
        assert refusal(lambda: open_tensor_file(sharded)).reason == "missing part"

    @pytest.mark.parametrize("way", ["folder", "linked-folder", "index"])
    def test_download_cache_layout(self, sharded: Path, way: str) -> None:
        """Every file of a snapshot, index and config included, is a link to a blob."""
        entry = sharded.parent / "models--a--b"
        snapshot = entry / "snapshots" / "0f3a"
        snapshot.mkdir(parents=True)
        (entry / "blobs").mkdir()
        (sharded / "config.json").write_text('{"model_type": "mixtral"}')
        for number, name in enumerate(sorted(os.listdir(sharded))):
            (sharded / name).rename(entry / "blobs" / f"{number:04x}")
            (snapshot / name).symlink_to(f"../../blobs/{number:04x}")
        (sharded.parent / "short").symlink_to(snapshot)
        path = {"folder": snapshot, "linked-folder": sharded.parent / "short", "index": snapshot / INDEX}[way]
        file = open_tensor_file(path)
        assert file.config == {"model_type": "mixtral"}
        assert all(torch.equal(file.read(name), values) for name, values in weights().items())

    def test_blobs_of_another_model_are_outside(self, sharded: Path) -> None:
        other = sharded.parent / "models--c--d" / "blobs"
        other.mkdir(parents=True)
        snapshot = sharded.parent / "models--a--b" / "snapshots" / "1"
        snapshot.parent.mkdir(parents=True)
        sharded.rename(snapshot)
        (snapshot / SHARDS[1]).rename(other / "00")
        (snapshot / SHARDS[1]).symlink_to(other / "00")
        assert refusal(lambda: open_tensor_file(snapshot)).reason == "path"

    def test_config_behind_a_link_out_of_the_folder(self, sharded: Path) -> None:
        (sharded.parent / "secret.json").write_text('{"password": "x"}')
        (sharded / "config.json").symlink_to("../secret.json")
        error = refusal(lambda: open_tensor_file(sharded))
        assert (error.reason, "password" in str(error)) == ("path", False)


class TestConfig:
    @pytest.mark.parametrize(
        "config",
        [
            {"num_experts": 4, "num_experts_per_tok": 5},
            {"num_local_experts": 4, "experts_per_token": 5},
            {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 7},
            {"model_type": "vl", "text_config": {"moe_num_experts": 4, "moe_k": 5}},
        ],
        ids=["qwen", "gpt-oss", "zero-experts", "nested"],
    )
    def test_more_experts_a_token_than_there_are(self, sharded: Path, config: dict[str, Any]) -> None:
        (sharded / "config.json").write_text(json.dumps(config))
        error = refusal(lambda: open_tensor_file(sharded))
        assert (error.reason, error.file) == ("model shape", str(sharded / "config.json"))
        assert "4" in str(error) or "6" in str(error)

    def test_experts_beyond_any_id(self, sharded: Path) -> None:
        """2^64 + 1 experts had every one of their names made before any was looked for; a fuzzed config did that."""
        (sharded / "config.json").write_text('{"num_local_experts": 18446744073709551617}')
        error = refusal(lambda: open_tensor_file(sharded))
        assert (error.reason, "65535" in str(error)) == ("model shape", True)

    def test_as_many_as_there_are(self, sharded: Path) -> None:
        (sharded / "config.json").write_text('{"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 6}')
        assert open_tensor_file(sharded).config["moe_topk"] == 6

    @pytest.mark.parametrize("text", ["", "[1]", '{"a": 1, "a": 2}', '{"a": ' + "[" * 9000, "{'a': 1}"])
    def test_config_that_is_none(self, sharded: Path, text: str) -> None:
        (sharded / "config.json").write_text(text)
        error = refusal(lambda: open_tensor_file(sharded))
        assert (error.reason, error.file) == ("config", str(sharded / "config.json"))


class TestChoice:
    def test_single_file_before_an_index(self, sharded: Path) -> None:
        save_file({"only": torch.zeros(1)}, sharded / "model.safetensors")
        assert set(open_tensor_file(sharded).tensors) == {"only"}

    def test_only_file_whatever_its_name(self, tmp_path: Path) -> None:
        save_file({"w": torch.zeros(1)}, tmp_path / "weights.safetensors")
        assert set(open_tensor_file(tmp_path).tensors) == {"w"}

    def test_shards_without_an_index(self, sharded: Path) -> None:
        (sharded / INDEX).unlink()
        error = refusal(lambda: open_tensor_file(sharded))
        assert (error.reason, INDEX in str(error), SHARDS[0] in str(error)) == ("missing part", True, True)

    def test_pickle_is_named_but_not_read(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
        error = refusal(lambda: open_tensor_file(tmp_path))
        assert (error.reason, "'pytorch_model.bin' is a Python pickle" in str(error)) == ("missing part", True)

    @pytest.mark.parametrize("suffix", [".gguf", ".safetensors", ""])
    def test_missing_and_pipes_are_refused_at_once(self, tmp_path: Path, suffix: str) -> None:
        os.mkfifo(tmp_path / f"pipe{suffix}")
        assert refusal(lambda: open_tensor_file(tmp_path / f"pipe{suffix}")).reason == "unreadable"
        assert refusal(lambda: open_tensor_file(tmp_path / f"none{suffix}")).reason == "not found"

    def test_folder_with_the_name_of_weights(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").mkdir()
        assert refusal(lambda: SafetensorsFile(tmp_path / "model.safetensors")).reason == "unreadable"
        assert refusal(lambda: open_tensor_file(tmp_path)).reason == "unreadable"
