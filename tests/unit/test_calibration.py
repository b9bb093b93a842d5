"""Calibration: what is measured, what is kept, and what readers make of it."""

import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from moe_lab.errors import CheckpointError, LabError
from moe_lab.stream import calibrate, calibration
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.calibrate import calibrate_copies, calibrate_disk, read_trial, spread
from moe_lab.stream.calibration import (
    Calibration,
    CopyPoint,
    DiskCell,
    DiskSurface,
    calibration_path,
    load_calibration,
    mount_of,
    reading_for,
    save_calibration,
)
from tests.support.expert_files import write_experts
from tests.support.fake_cuda import FakeCuda

KIB = 1 << 10


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_LAB_CACHE", str(tmp_path / "cache"))


def cell(threads: int, kib: int, speed: float, io: str = "direct", cpu: float = 0.05) -> DiskCell:
    return DiskCell(threads, kib * KIB, io, speed, speed * 0.9, speed * 1.1, cpu, 5)


def surface(mount: str, *cells: DiskCell) -> DiskSurface:
    return DiskSurface(mount, "ext4 /dev/x", "2026-01-01", cells)


class TestBest:
    def test_the_fastest_by_far(self):
        assert surface("/", cell(1, 64, 1.0), cell(8, 64, 2.0)).best() == cell(8, 64, 2.0)

    def test_of_equals_the_fewest_threads_then_the_largest_request(self):
        cells = cell(8, 256, 2.0), cell(2, 256, 1.96), cell(2, 1024, 1.95), cell(1, 1024, 1.9)
        assert surface("/", *cells).best() == cells[2]

    def test_of_one_way_of_reading(self):
        cells = cell(4, 64, 1.0), cell(4, 64, 3.0, "dropped")
        assert surface("/", *cells).best("direct") == cells[0]
        with pytest.raises(LabError, match="nothing measured with io='buffered'"):
            surface("/", *cells).best("buffered")

    @pytest.mark.parametrize(
        ("request_kib", "threads", "speed"), [(64, 1, 1.0), (100, 1, 1.0), (700, 3, 4.0), (9999, 99, 4.0)]
    )
    def test_a_speed_is_that_of_the_nearest_setting(self, request_kib: int, threads: int, speed: float):
        found = surface("/", cell(1, 64, 1.0), cell(4, 64, 2.0), cell(1, 1024, 3.0), cell(4, 1024, 4.0))
        assert found.gb_per_s(request_kib * KIB, threads) == speed


class TestKept:
    def test_disks_and_devices_are_kept_beside_each_other(self):
        assert load_calibration().disks == {}
        first, second = surface("/", cell(1, 64, 1.0)), surface("/data", cell(2, 256, 5.0))
        curve = (CopyPoint(1 << 20, True, 0.02, 0.019, 0.03, 20),)
        save_calibration(disk=first)
        save_calibration(disk=second, device="GPU A", curve=curve)
        save_calibration(disk=surface("/", cell(1, 64, 1.5)))
        found = load_calibration()
        assert found.disks == {"/": surface("/", cell(1, 64, 1.5)), "/data": second}
        assert found.host_device == {"GPU A": curve}
        assert calibration_path().is_relative_to(os.environ["MOE_LAB_CACHE"])

    @pytest.mark.parametrize("value", ["[]", '{"version": 1}', '{"version": 1, "machine": "x", "disks": {"/": {}}}'])
    def test_a_file_that_is_none_is_named(self, value: str):
        calibration_path().parent.mkdir(parents=True)
        calibration_path().write_text(value)
        with pytest.raises(LabError, match=r"calibration.*Delete it"):
            load_calibration()

    def test_another_version_counts_for_nothing(self):
        save_calibration(disk=surface("/", cell(1, 64, 1.0)))
        value = json.loads(calibration_path().read_text())
        calibration_path().write_text(json.dumps({**value, "version": 0}))
        assert load_calibration().disks == {}

    def test_copies_between_and_beyond_the_measured_sizes(self):
        points = tuple(CopyPoint(n << 20, True, ms, ms, ms, 9) for n, ms in ((1, 0.1), (3, 0.2), (11, 0.6)))
        found = Calibration("here", {}, {"GPU": points})
        assert [found.copy_ms("GPU", n << 20) for n in (0, 1, 2, 7, 11, 22)] == pytest.approx(
            [0.1, 0.1, 0.15, 0.4, 0.6, 1.2]
        )
        assert found.copy_ms("GPU", 1 << 20, pinned=False) is None
        assert found.copy_ms("another", 1 << 20) is None


class TestReaders:
    def test_without_one_there_are_defaults(self, tmp_path: Path):
        assert reading_for(tmp_path) == (calibration.THREADS, calibration.REQUEST_BYTES) == (4, 4 << 20)

    def test_threads_and_requests_are_the_calibrated_ones(self, tmp_path: Path):
        mount = mount_of(tmp_path)
        save_calibration(disk=surface(mount, cell(2, 256, 3.0), cell(4, 64, 1.0), cell(1, 64, 9.0, "dropped")))
        assert reading_for(tmp_path) == (2, 256 * KIB)
        source = write_experts(tmp_path / "x.bin")
        for given, taken in ((None, 2), (3, 3)):
            with ExpertCache(slots=2, threads=given) as cache:
                cache.bind(source, "cpu")
                assert len(cache._pool.threads) == taken  # type: ignore[union-attr]
                assert cache._partitions[0]._request_bytes == 256 * KIB
                cache.lease(source, 0, [1]).release()

    def test_a_disk_that_serves_no_direct_reads_has_its_own_best(self, tmp_path: Path):
        save_calibration(disk=surface(mount_of(tmp_path), cell(2, 256, 3.0, "dropped"), cell(8, 64, 9.0, "dropped")))
        assert reading_for(tmp_path) == (8, 64 * KIB)


class TestDisk:
    FEW: ClassVar[dict[str, Any]] = {
        "threads": (1, 2), "request_bytes": (256 * KIB,), "rounds": 2, "trial_bytes": 4 << 20,
    }  # fmt: skip

    def test_a_folder_gets_a_file_that_is_gone_afterwards(self, tmp_path: Path):
        told: list[tuple[int, int]] = []
        found = calibrate_disk(tmp_path, file_bytes=8 << 20, told=lambda *n: told.append(n), **self.FEW)
        assert list(tmp_path.iterdir()) == []
        assert {(c.threads, c.request_bytes) for c in found.cells} == {(1, 256 * KIB), (2, 256 * KIB)}
        for c in found.cells:
            assert 0 < c.gb_per_s_p20 <= c.gb_per_s <= c.gb_per_s_p80
            assert (c.n, c.cpu_s_per_gb > 0) == (2, True)
        assert (found.mount, told[-1][0]) == (mount_of(tmp_path), told[-1][1])

    def test_a_file_is_read_itself_and_left_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        file = tmp_path / "model.bin"
        file.write_bytes(bytes(8 << 20))
        before = file.stat()
        with pytest.raises(LabError, match="8,388,608 bytes; a disk is measured on"):
            calibrate_disk(file, **self.FEW)
        monkeypatch.setattr(calibrate, "LEAST_FILE_BYTES", 1 << 20)
        calibrate_disk(file, **self.FEW)
        assert (file.stat().st_mtime_ns, file.stat().st_size) == (before.st_mtime_ns, before.st_size)

    def test_a_path_that_is_not_there_is_named(self, tmp_path: Path):
        with pytest.raises(CheckpointError, match="nowhere"):
            calibrate_disk(tmp_path / "nowhere", **self.FEW)

    def test_a_full_disk_is_told_and_the_file_removed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def full(fd: int) -> None:
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(LabError, match=r"cannot calibrate on .*No space left on device"):
            calibrate_disk(tmp_path, file_bytes=2 << 20, **self.FEW)
        assert list(tmp_path.iterdir()) == []

    def test_a_slower_disk_is_measured_slower(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """The clock counts the reads: with 20 ms more in each of 8, a trial takes at least 80 ms on two threads."""
        import time

        from moe_lab.checkpoint.rawfile import RawFile

        file = tmp_path / "x.bin"
        file.write_bytes(bytes(4 << 20))
        quick = read_trial(file, (2, 256 * KIB, "buffered"), 2 << 20, 0)[0]
        plain = RawFile.read_into

        def late(self, offset, view, *, tensor=None):
            time.sleep(0.02)
            plain(self, offset, view, tensor=tensor)

        monkeypatch.setattr(RawFile, "read_into", late)
        slow = read_trial(file, (2, 256 * KIB, "buffered"), 2 << 20, 0)[0]
        assert slow >= 0.08
        assert slow > quick

    def test_an_error_while_reading_is_raised_not_timed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        from moe_lab.checkpoint.rawfile import RawFile

        file = tmp_path / "x.bin"
        file.write_bytes(bytes(4 << 20))

        def broken(self, offset, view, *, tensor=None):
            raise CheckpointError(file, "unreadable", "made up")

        monkeypatch.setattr(RawFile, "read_into", broken)
        with pytest.raises(CheckpointError, match="made up"):
            read_trial(file, (2, 256 * KIB, "buffered"), 2 << 20, 0)

    def test_spread_is_the_percentiles(self):
        assert spread([float(n) for n in range(11)]) == (2.0, 5.0, 8.0)
        assert spread([3.0]) == (3.0, 3.0, 3.0)


class TimedCuda(FakeCuda):
    """Events whose time is the number of bytes that were asked for so far."""

    def Event(self, enable_timing: bool = False, **_: object):
        outer = self

        class Timed:
            def record(self) -> None:
                self.at = outer.clock = getattr(outer, "clock", 0.0) + 0.5

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: "Timed") -> float:
                return other.at - self.at

        return Timed()


class TestCopies:
    def test_both_kinds_of_memory_at_every_size(self):
        points = calibrate_copies(torch.device("cpu"), sizes=(4096, 8192), rounds=3, cuda=TimedCuda())
        assert [(p.pinned, p.nbytes, p.ms, p.n) for p in points] == [
            (True, 4096, 0.5, 3), (True, 8192, 0.5, 3), (False, 4096, 0.5, 3), (False, 8192, 0.5, 3),
        ]  # fmt: skip
        assert points[0].gb_per_s == pytest.approx(4096 / 0.5e-3 / 1e9)

    def test_memory_that_could_not_be_locked_is_not_called_locked(self):
        cuda = TimedCuda()
        cuda.runtime.code = 2
        with pytest.warns(RuntimeWarning, match="page-locking"):
            points = calibrate_copies(torch.device("cpu"), sizes=(4096,), rounds=2, cuda=cuda)
        assert [p.pinned for p in points] == [False]
