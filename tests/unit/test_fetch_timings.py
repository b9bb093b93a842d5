"""benchmarks/fetch_timings.py: what it writes, and that wrong bytes end it before a time is taken."""

import csv
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import fetch_ceilings
from moe_lab.errors import LabError
from moe_lab.stream import cache
from moe_lab.stream.pack import pack
from moe_lab.stream.packed import PackedSource

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "fetch_timings.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("fetch_timings", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_way_has_a_row_with_its_ratio_and_nothing_is_left(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(cache, "reading_for", cache.reading_for)  # what the script sets ends with the test
    monkeypatch.setattr(fetch_ceilings, "SMALLEST_COPY_BYTES", 8 << 20)
    words = [
        "--out",
        str(tmp_path),
        "--expert-mib",
        "1",
        "--request-kib",
        "256",
        "--threads",
        "2",
        "--file-gib",
        "0.01",
    ]
    monkeypatch.setattr(sys, "argv", ["fetch_timings", *words, "--trial-mib", "8", "--rounds", "1"])
    assert script.main() in (0, 1)  # slow here is no fault of the script's
    rows = list(csv.DictReader((tmp_path / "fetch.csv").open()))
    assert list(rows[0]) == script.COLUMNS
    ways = {row["what"] for row in rows}
    assert {"packed, direct", "in place, direct", "packed, dropped", "packed, page cache", "memcpy x2"} <= ways
    for row in rows:
        assert float(row["gb_per_s"]) > 0
        assert float(row["ratio"]) > 0
        assert (row["n"], row["threads"]) == ("1", "2")
    assert [p.name for p in tmp_path.iterdir()] == ["fetch.csv"]
    assert "right: PackedSource" in capsys.readouterr().out


def test_wrong_bytes_have_no_time(script: ModuleType, tmp_path: Path):
    model = script.write_model(tmp_path / "m.bin", 16, 1 << 20)
    packed = PackedSource(pack(model, tmp_path / "m.experts").path)
    for source in (model, packed):
        script.check(source, model.block, io="buffered")
        run = source.geometry(0).runs[2]
        data = bytearray(source.path.read_bytes())
        data[run.starts[9] + 1000] ^= 1
        source.path.write_bytes(data)
    with pytest.raises(LabError, match="expert 9, down has wrong bytes"):
        script.check(PackedSource(packed.path), model.block, io="buffered")
