"""Launch tables: which tile a launcher takes on a device, and what a bad table says."""

import json
from pathlib import Path

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab.system.user_cache import slug
from moe_lab_kernels.grouped.tiles import TOKENS, Tile
from moe_lab_kernels.launch import table
from moe_lab_kernels.launch.schema import KERNELS
from moe_lab_kernels.launch.table import Entry, cut, nearest, own_path, read_table, write_table
from moe_lab_kernels.mmq.wide import WideTile

TILES = {"wide": WideTile(64, 64, 2, 3)}
CARD = "A Card 9000"
BUILT_IN = Tile(64, 4, 3)


def entry(n: int = 768, kd: int = 2048, format: str = "q2_k", tokens: int = 16, gated: bool = True, **cut) -> Entry:
    return Entry("grouped", format, tokens, gated, n, kd, cut or {"rows": 128, "warps": 8}, 9.0, 10.0)


def row(**changed) -> dict:
    plain = {"kernel": "grouped", "format": "q2_k", "tokens": 16, "gated": True, "n": 768, "kd": 2048,
             "cut": {"rows": 128}, "us": 9.0, "default_us": 10.0}  # fmt: skip
    return {**plain, **changed}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A device of that name, whose shipped and own tables are files of the test's."""
    monkeypatch.setattr(table, "device_name", lambda device: CARD)
    monkeypatch.setattr(table, "INTERPRETED", False)
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("MOE_LAB_CACHE", str(tmp_path / "cache"))
    table.forget()
    yield tmp_path / "shipped" / f"{slug(CARD)}.json"
    table.forget()


def taken(n: int = 768, kd: int = 2048, format: str = "q2_k", tokens: int = 16, gated: bool = True) -> Tile:
    return cut("grouped", BUILT_IN, torch.device("cpu"), format, tokens, gated=gated, n=n, kd=kd)


def test_an_unknown_device_keeps_the_built_in_tile(card: Path) -> None:
    assert taken() == BUILT_IN


def test_an_entry_changes_the_fields_that_it_names(card: Path) -> None:
    write_table(card, CARD, [entry(rows=128, warps=8)], {})
    assert taken() == BUILT_IN._replace(rows=128, warps=8)


@pytest.mark.parametrize("other", [{"format": "q3_k"}, {"tokens": 32}, {"gated": False}], ids=str)
def test_an_entry_serves_its_format_width_and_form_alone(card: Path, other: dict) -> None:
    write_table(card, CARD, [entry()], {})
    assert taken(**other) == BUILT_IN


def test_the_nearest_shape_decides_and_of_equals_the_earlier() -> None:
    near, far, twin = entry(768, 2048, stages=2), entry(14336, 4096, stages=3), entry(768, 2048, stages=4)

    def found(*entries: Entry, n: int, kd: int) -> Entry | None:
        return nearest(entries, "grouped", "q2_k", 16, gated=True, n=n, kd=kd)

    assert found(near, far, n=1024, kd=2048) is near
    assert found(far, near, n=8192, kd=4096) is far
    assert found(near, twin, n=768, kd=2048) is near
    assert found(twin, near, n=768, kd=2048) is twin
    assert found(n=768, kd=2048) is None


def test_the_users_table_comes_before_the_shipped_one(card: Path) -> None:
    write_table(card, CARD, [entry(stages=2), entry(format="q3_k", stages=2)], {})
    write_table(own_path(CARD), CARD, [entry(stages=5)], {})
    assert (taken().stages, taken(format="q3_k").stages) == (5, 2)


def test_off_cuda_and_in_the_interpreter_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path):
        raise AssertionError(f"read {path}")

    monkeypatch.setattr(table, "read_table", fail)
    table.forget()
    assert taken() == BUILT_IN
    monkeypatch.setattr(table, "device_name", lambda device: CARD)
    monkeypatch.setattr(table, "INTERPRETED", True)
    assert taken() == BUILT_IN


def test_tiles_can_be_those_of_another_device(card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(card, CARD, [entry()], {})
    assert table.shipped_devices() == [CARD]
    monkeypatch.undo()
    monkeypatch.setattr(table, "SHIPPED", card.parent)
    table.forget()
    with table.looked_up_for(CARD):
        assert taken().rows == 128
    assert taken() == BUILT_IN


def test_a_written_table_reads_back(tmp_path: Path) -> None:
    some = [entry(), entry(rows=64, registers=None), Entry("wide", "q6_k/q8_k", 128, False, 8, 256, {}, 1.0, 1.0)]
    path = write_table(tmp_path / "t.json", CARD, some, {"torch": "2"})
    assert read_table(path) == tuple(some)
    assert json.loads(path.read_text())["about"] == {"torch": "2"}


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"kernel": "gemm"}, "no kernel is called 'gemm'"),
        ({"cut": {"rows": 96}}, "rows: wanted a power of two from 64 to 256, got 96"),
        ({"cut": {"rows": 32}}, "rows: wanted a power of two"),
        ({"cut": {"warps": 2}}, "warps: wanted"),
        ({"cut": {"stages": 0}}, "stages: wanted a whole number from 1 to 8, got 0"),
        ({"cut": {"stages": True}}, "stages: wanted"),
        ({"cut": {"registers": 8}}, "registers: wanted a whole number from 24 to 255 or null"),
        ({"cut": {"lanes": 8}}, "grouped has no 'lanes'"),
        ({"cut": [128]}, "cut as names and values"),
        ({"tokens": 0}, "tokens is 0"),
        ({"kd": 2048.0}, "kd is 2048.0"),
        ({"gated": 1}, "gated as true or false"),
        ({"us": float("nan")}, "us is nan; wanted microseconds, a positive number"),
        ({"us": "9"}, "us is '9'"),
        ({"default_us": float("inf")}, "default_us is inf"),
        ({"default_us": 0.0}, "default_us is 0.0"),
        ({"us": True}, "us is True"),
    ],
    ids=str,
)
def test_a_bad_entry_names_file_entry_and_fault(card: Path, changed: dict, says: str) -> None:
    good = {"version": 1, "device": CARD, "entries": [row(), row(**changed)]}
    card.parent.mkdir()
    card.write_text(json.dumps(good))
    with pytest.raises(LabError) as caught:
        taken()
    assert says in str(caught.value)
    assert f"{card}, entry 1" in str(caught.value)
    assert "--tune" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "version 'list'"),
        ('{"version": 7}', "version 7; wanted 1"),
        ('{"version": 1}', "entries are NoneType"),
        ('{"version": 1, "entries": [{}]}', "KeyError"),
        ("{", "cannot read"),
    ],
)
def test_a_file_that_is_no_table_is_named(card: Path, text: str, says: str) -> None:
    card.parent.mkdir()
    card.write_text(text)
    with pytest.raises(LabError, match=says) as caught:
        taken()
    assert str(card) in str(caught.value)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_schema_names_fields_that_the_tiles_have(kernel: str) -> None:
    tile = TILES.get(kernel, BUILT_IN)
    assert set(KERNELS[kernel]) <= set(tile._fields)
    assert not {"lanes", "staged", "by_warp"} & set(KERNELS[kernel])


@pytest.mark.parametrize("path", sorted(table.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_table_is_of_its_device_and_says_where_it_was_measured(path: Path) -> None:
    whole = json.loads(path.read_text())
    assert slug(whole["device"]) == path.stem
    assert {"driver", "torch", "triton", "commit", "moe_lab"} == set(whole["about"])
    assert whole["about"]["commit"] != "none"
    for one in read_table(path):
        assert one.tokens in TOKENS
        assert 0 < one.us <= one.default_us
        assert set(one.cut) in (set(), set(KERNELS[one.kernel])), "the built-in tile, or a whole one"
