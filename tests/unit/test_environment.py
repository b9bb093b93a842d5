"""What a record says it was measured on: driver, commit and versions, wherever the lab stands."""

import subprocess
from pathlib import Path

import pytest
import torch

import moe_lab as lab
from moe_lab.system import environment


@pytest.mark.parametrize(("says", "driver"), [("580.159.04\n", "580.159.04"), ("", "unknown"), (None, "unknown")])
def test_driver_is_what_nvidia_smi_says(monkeypatch: pytest.MonkeyPatch, says: str | None, driver: str) -> None:
    def smi(command: list[str], **_: object) -> subprocess.CompletedProcess:
        if says is None:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, 0, stdout=says)

    assert environment.driver() == "none" or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", smi)
    assert environment.driver() == driver


WRITTEN = [
    ("667f549\n", "667f549"), ("667f549+", "667f549+"), ("667f5499d3b1c0ffee0123456789abcdef012345\n", "667f549"),
    ("667f549 and what the tree held\n", "667f549"), ("main\n", "none"), ("667f5\n", "none"), ("", "none"),
    (None, "none"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "commit"), WRITTEN, ids=[repr(text) for text, _ in WRITTEN])
def test_a_copy_without_git_has_the_commit_that_its_file_names(tmp_path: Path, text: str | None, commit: str) -> None:
    if text is not None:
        (tmp_path / "COMMIT").write_text(text)
    assert environment.commit(tmp_path) == "none", "a folder without pyproject.toml is no source tree"
    (tmp_path / "pyproject.toml").touch()
    assert environment.commit(tmp_path) == commit


def test_the_tree_that_is_asked_is_this_one() -> None:
    """A module that moves takes its own path with it: every record would say "none"."""
    assert Path(__file__).is_relative_to(environment.ROOT)
    assert (environment.ROOT / "pyproject.toml").is_file()


def test_git_is_asked_before_the_file(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (tmp_path / "COMMIT").write_text("0000000")
    git("add", "COMMIT")
    git("commit", "-qm", "one")
    head = git("rev-parse", "--short", "HEAD").strip()
    assert environment.commit(tmp_path) == head
    (tmp_path / "COMMIT").write_text("1111111")
    assert environment.commit(tmp_path) == f"{head}+"


def test_a_source_tree_that_nobody_installed_knows_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise environment.PackageNotFoundError(package)

    monkeypatch.setattr(environment, "version", absent)
    assert environment.environment()["moe_lab"] == lab.__version__
    assert environment.environment()["triton"] == "not installed"
