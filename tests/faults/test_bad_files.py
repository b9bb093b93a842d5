"""The collection of broken, hostile and unusual model files: each has the outcome its index states, within limits."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_lab.checkpoint import open_tensor_file
from moe_lab.errors import CheckpointError
from tests.support.descriptors import open_descriptors

ROOT = Path(__file__).resolve().parents[2]
COLLECTION = Path(__file__).parent / "data" / "bad_files"
CASES = json.loads((COLLECTION / "index.json").read_text())["cases"]

# Two cases live on links. The repository keeps what git leaves where links are off: files with the links' text.
LINKS = {
    "dirs/path_symlink/model-00002-of-00002.safetensors": "../../outside/outside.safetensors",
    "dirs/hub_layout/snapshots/main/model-00001-of-00002.safetensors": "../../blobs/00aa",
    "dirs/hub_layout/snapshots/main/model-00002-of-00002.safetensors": "../../blobs/00bb",
}
AS_TEXT = [case for case in CASES if any(link.startswith(f"{case['path']}/") for link in LINKS)]


def each(cases: list[dict[str, Any]]) -> pytest.MarkDecorator:
    """One test a case, called by its id."""
    return pytest.mark.parametrize("case", cases, ids=[case["id"] for case in cases])


def looked_at(paths: list[Path]) -> list[dict[str, Any]]:
    """What a fresh process makes of each file."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.file_worker"],
        cwd=ROOT, input="".join(f"{path}\n" for path in paths), capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The collection with its links as links."""
    folder = tmp_path_factory.mktemp("linked") / "bad_files"
    shutil.copytree(COLLECTION, folder)
    for path, target in LINKS.items():
        assert (folder / path).read_text() == target
        (folder / path).unlink()
        (folder / path).symlink_to(target)
    return folder


@pytest.fixture(scope="module")
def seen(linked: Path) -> dict[str, dict[str, Any]]:
    """Every case's answer by its path in the collection; with "text/" before it, that of links written out as text."""
    places = {case["path"]: linked / case["path"] for case in CASES}
    places |= {f"text/{case['path']}": COLLECTION / case["path"] for case in AS_TEXT}
    return dict(zip(places, looked_at(list(places.values())), strict=True))


def check_outcome(case: dict[str, Any], answer: dict[str, Any]) -> None:
    assert answer["outcome"] != "crash", answer["what"]
    # "either" leaves the choice; ours are written down here: a positive int32 alignment means what a uint32 does, F4
    # alone has no values (.raw gives its bytes), and links leave the folder for a download cache's blobs only.
    loads = case["outcome"] == "load" or case["id"] == "gguf_align_int32"
    assert (answer["outcome"] == "load") == loads, answer["errors"]


def check_errors(case: dict[str, Any], answer: dict[str, Any]) -> None:
    assert answer["errors"]
    for error in answer["errors"]:
        assert error["reason"] == case["reason"]
        assert case["path"] in error["file"]
        assert error["message"].startswith(error["file"])
        assert "\n" not in error["message"]
        assert all(word in error["message"] for word in case.get("must_name", []))


@each(CASES)
def test_outcome(case: dict[str, Any], seen: dict[str, dict[str, Any]]) -> None:
    check_outcome(case, seen[case["path"]])


@each(CASES)
def test_limits(case: dict[str, Any], seen: dict[str, dict[str, Any]]) -> None:
    answer = seen[case["path"]]
    assert answer["seconds"] < case["max_seconds"]
    assert answer["extra_mb"] < case["max_extra_mb"]


@each([case for case in CASES if case["outcome"] in ("error", "either") and case["id"] != "gguf_align_int32"])
def test_error_says_what_and_where(case: dict[str, Any], seen: dict[str, dict[str, Any]]) -> None:
    check_errors(case, seen[case["path"]])


@each([case for case in CASES if case["outcome"] == "load" or case["id"] == "gguf_align_int32"])
def test_values(case: dict[str, Any], seen: dict[str, dict[str, Any]]) -> None:
    check_values(case, seen[case["path"]])


def check_values(case: dict[str, Any], answer: dict[str, Any]) -> None:
    tensors, expect = answer["tensors"], case["expect"]
    if "tensors" in expect:
        assert set(tensors) == set(expect["tensors"])
    for name, facts in expect.get("tensors", {}).items():
        got = tensors[name]
        assert got["format"] == facts.get("type", facts.get("dtype")).lower()
        stated = {key: facts[key] for key in ("shape", "count", "sum", "abs_sum", "sha256") if key in facts}
        assert {key: got[key] for key in stated} == stated
        assert {at: got["values"][int(at)] for at in facts.get("at", {})} == facts.get("at", {})
    for name, facts in expect.get("dequant", {}).items():
        assert {at: value_at(tensors[name], at) for at in facts} == facts


def value_at(tensor: dict[str, Any], at: str) -> float:
    """The value at "[row,column]"."""
    row, column = json.loads(at)
    return tensor["values"][row * tensor["value_shape"][-1] + column]


@each(AS_TEXT)
def test_link_written_out_as_text_counts_as_the_link(case: dict[str, Any], seen: dict[str, dict[str, Any]]) -> None:
    answer = seen[f"text/{case['path']}"]
    check_outcome(case, answer)
    if answer["outcome"] == "load":
        check_values(case, answer)
    else:
        check_errors(case, answer)


@pytest.mark.parametrize("number", [4, 31, 99, 2147483648])
def test_unknown_type_costs_only_its_own_tensor(number: int, seen: dict[str, dict[str, Any]]) -> None:
    answer = seen[f"gguf/type_{number}.gguf"]
    assert answer["opened"]
    assert answer["metadata"] == 1
    assert list(answer["tensors"]) == ["a.weight"]
    assert [error["tensor"] for error in answer["errors"]] == ["b.weight"]


@pytest.mark.parametrize("name", ["n_kv_huge", "n_tensors_huge", "n_tensors_2_32", "array_2_63"])
def test_claimed_counts_cost_nothing(name: str, seen: dict[str, dict[str, Any]]) -> None:
    answer = seen[f"gguf/{name}.gguf"]
    assert answer["seconds"] < 0.5
    assert answer["extra_mb"] < 20


@each([case for case in CASES if case["path"].startswith("dirs/path_")])
def test_nothing_of_the_outside_file_is_shown(case: dict[str, Any], seen: dict[str, dict[str, Any]]) -> None:
    answer = seen[case["path"]]
    assert not answer["opened"]
    outside = (COLLECTION / "outside" / "outside.safetensors").read_bytes()
    assert b"l.1.a" in outside
    assert all("l.1.a" not in error["message"] for error in answer["errors"])


def test_no_descriptor_is_left_after_a_refusal(linked: Path) -> None:
    before = open_descriptors()
    for case in CASES:
        if case["outcome"] == "error" and not case["path"].startswith("gguf/type_"):
            with pytest.raises(CheckpointError):
                open_tensor_file(linked / case["path"])
    assert open_descriptors() == before
