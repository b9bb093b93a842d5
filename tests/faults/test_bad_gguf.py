"""The collection of broken, hostile and unusual GGUF files: each has the outcome its index states, within limits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_lab.formats import FORMATS

ROOT = Path(__file__).resolve().parents[2]
COLLECTION = ROOT.parent / "shared" / "bad_files"


def _cases() -> list[dict[str, Any]]:
    index = COLLECTION / "index.json"
    if not index.is_file():
        return []
    return [case for case in json.loads(index.read_text())["cases"] if case["path"].startswith("gguf/")]


CASES = _cases()
pytestmark = pytest.mark.skipif(not CASES, reason="no collection of bad files beside the clone (../shared/bad_files)")


def each(cases: list[dict[str, Any]]) -> pytest.MarkDecorator:
    """One test a case, called by its id."""
    return pytest.mark.parametrize("case", cases, ids=[case["id"] for case in cases])


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, Any]]:
    """What a fresh process makes of each file."""
    paths = "".join(f"{COLLECTION / case['path']}\n" for case in CASES)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.file_worker"],
        cwd=ROOT, input=paths, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return {Path(answer["path"]).relative_to(COLLECTION).as_posix(): answer for answer in answers}


def only_undecoded(answer: dict[str, Any]) -> bool:
    """Whether all that failed are tensors of a known type that has no decoder in this version, their bytes readable."""
    failed = [error["tensor"] for error in answer["errors"]]
    return answer["opened"] and all(
        name in answer["tensors"] and answer["tensors"][name]["format"] not in FORMATS for name in failed
    )


@each(CASES)
def test_outcome(case: dict[str, Any], seen: dict[str, dict[str, Any]]) -> None:
    answer = seen[case["path"]]
    assert answer["outcome"] != "crash", answer["what"]
    loads = answer["outcome"] == "load" or only_undecoded(answer)
    # "either" leaves the choice; ours is written down here: a positive int32 alignment means what a uint32 does.
    assert loads == (case["outcome"] in ("load", "either"))


@each(CASES)
def test_limits(case: dict[str, Any], seen: dict[str, dict[str, Any]]) -> None:
    answer = seen[case["path"]]
    assert answer["seconds"] < case["max_seconds"]
    assert answer["extra_mb"] < case["max_extra_mb"]


@each([case for case in CASES if case["outcome"] == "error"])
def test_error_says_what_and_where(case: dict[str, Any], seen: dict[str, dict[str, Any]]) -> None:
    answer = seen[case["path"]]
    for error in answer["errors"]:
        assert error["reason"] == case["reason"]
        assert error["file"].endswith(case["path"])
        assert case["path"] in error["message"]
        assert "\n" not in error["message"]
        assert all(word in error["message"] for word in case.get("must_name", []))
    assert answer["errors"]


@each([case for case in CASES if "expect" in case])
def test_values(case: dict[str, Any], seen: dict[str, dict[str, Any]]) -> None:
    answer = seen[case["path"]]
    wanted = case["expect"]["tensors"]
    assert set(answer["tensors"]) == set(wanted)
    for name, facts in wanted.items():
        got = answer["tensors"][name]
        assert got["format"] == facts["type"].lower()
        assert [got[key] for key in ("shape", "count", "sum", "abs_sum")] == [
            facts[key] for key in ("shape", "count", "sum", "abs_sum")
        ]
        assert {at: got["values"][int(at)] for at in facts["at"]} == facts["at"]


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
