"""Reads past the page cache and out of it: any range, any address, the exact bytes; and what each way leaves behind."""

import ctypes
import errno
import gc
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lab.checkpoint.rawfile import RawFile
from moe_lab.errors import CheckpointError, LabError
from moe_lab.stream import access, direct
from moe_lab.stream.access import IO_MODES, open_files
from moe_lab.stream.direct import Alignment, DirectFile
from moe_lab.stream.faults import FaultyReads
from moe_lab.stream.memory import host_block

SIZE = 3 * direct.SCRATCH_BYTES + 4321  # no multiple of a block
DATA = np.random.default_rng(3).bytes(SIZE)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("direct") / "data.bin"
    file.write_bytes(DATA)
    if not access.serves_direct(file):
        pytest.skip("this file system serves no direct reads")
    return file


@pytest.fixture(scope="module")
def memory() -> memoryview:
    return host_block(SIZE + 3 * 4096).numpy().data


lengths = st.one_of(
    st.sampled_from([0, 1, 7, 511, 512, 513, 1023, 1024, 1025, 4095, 4096, 4097]), st.integers(0, 20_000),
    st.integers(direct.SCRATCH_BYTES - 600, direct.SCRATCH_BYTES + 600), st.integers(0, SIZE),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(length=lengths, offset=st.integers(0, SIZE), place=st.integers(0, 4096), alike=st.booleans(), end=st.booleans())
def test_any_range_at_any_address_is_exact(
    path: Path, memory: memoryview, length: int, offset: int, place: int, alike: bool, end: bool
):
    offset = SIZE - length if end else min(offset, SIZE - length)
    place = 4096 + (offset % 4096 if alike else place)
    memory[place - 1] = 0xAA
    memory[place + length] = 0xBB
    file = DirectFile(path)
    file.read_into(offset, memory[place : place + length])
    file.close()
    assert memory[place : place + length] == DATA[offset : offset + length]
    assert (memory[place - 1], memory[place + length]) == (0xAA, 0xBB)


@pytest.mark.parametrize("needs", [Alignment(512, 4), Alignment(512, 512), Alignment(4096, 512)], ids=str)
def test_every_call_keeps_to_the_blocks_and_addresses_it_was_told(
    path: Path, memory: memoryview, needs: Alignment, monkeypatch: pytest.MonkeyPatch
):
    def strict(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert offset % needs.block == 0
        for buffer in buffers:
            assert buffer.nbytes % needs.block == 0
            assert np.frombuffer(buffer, np.uint8).ctypes.data % needs.memory == 0
        took.append([buffer.nbytes for buffer in buffers])
        return read_plainly(path, buffers, offset)

    took: list[list[int]] = []
    monkeypatch.setattr(direct, "direct_alignment", lambda fd: needs)
    file = DirectFile(path, strict)
    for offset, length, place in [(37, 50_000, 4096 + 37), (37, 50_000, 4096), (37, 50_000, 4141), (0, 8192, 4096)]:
        file.read_into(offset, memory[place : place + length])
        assert memory[place : place + length] == DATA[offset : offset + length]
    block = needs.block
    straight, scratch = [block, (50_037 - block) // block * block, block], [-(-50_037 // block) * block]
    # Edges apart and the rest to its place; where addresses do not agree, everything; a packed row: one read.
    assert took == [straight, scratch, straight if needs.memory == 4 else scratch, [8192]]


def read_plainly(path: Path, buffers: Sequence[memoryview], offset: int) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(fd, buffers, offset)
    finally:
        os.close(fd)


@pytest.mark.parametrize("short", [512, 4096, 65536], ids="short{}".format)
@pytest.mark.parametrize("place", [4096, 4096 + 100], ids=["straight", "through-scratch"])
def test_s07_short_direct_reads_are_continued_at_a_block(path: Path, memory: memoryview, short: int, place: int):
    faulty = FaultyReads(short=short, errors={2: errno.EINTR, 5: errno.EINTR})
    file = DirectFile(path, faulty)
    file.read_into(100, memory[place + 100 : place + 200_100])
    assert memory[place + 100 : place + 200_100] == DATA[100:200_100]
    assert faulty.calls >= 200_000 // short + 2


@pytest.mark.parametrize("most", [513, 700, 5000], ids="most{}".format)
def test_a_short_read_that_ends_inside_a_block_goes_on_at_the_blocks_begin(path: Path, memory: memoryview, most: int):
    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert offset % 512 == 0
        return min(most, os.preadv(fd, buffers, offset))

    file = DirectFile(path, short)
    for place in (4096 + 100, 4096):
        file.read_into(100, memory[place : place + 20_000])
        assert memory[place : place + 20_000] == DATA[100:20_100]


@pytest.mark.parametrize("kind", [DirectFile, RawFile], ids=["direct", "plain"])
def test_a_range_is_read_in_requests_of_the_size_asked_for(path: Path, memory: memoryview, kind: type[RawFile]):
    took: list[tuple[int, int]] = []

    def counted(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        took.append((offset, sum(b.nbytes for b in buffers)))
        return os.preadv(fd, buffers, offset)

    whole = 8 * 65_536
    kind(path, counted).read_into(8192, memory[:whole], request_bytes=65_536)
    assert memory[:whole] == DATA[8192 : 8192 + whole]
    assert took == [(8192 + at, 65_536) for at in range(0, whole, 65_536)]
    took.clear()
    kind(path, counted).read_into(8192, memory[:whole])
    assert took == [(8192, whole)]


def test_an_early_end_names_what_was_wanted_and_what_came(path: Path, memory: memoryview):
    file = DirectFile(path, FaultyReads(ends_at=8192))
    with pytest.raises(CheckpointError, match="at byte 8192: 9000 bytes wanted from byte 100, 8092 came") as caught:
        file.read_into(100, memory[:9000])
    assert (caught.value.reason, caught.value.seen, caught.value.wanted) == ("truncated", 8092, 9000)
    with pytest.raises(CheckpointError, match=f"cut short at byte {SIZE}"):
        DirectFile(path).read_into(SIZE - 10, memory[:100])


def test_a_file_that_changed_is_told_by_that(tmp_path: Path, memory: memoryview, path: Path):
    file = tmp_path / "x.bin"
    file.write_bytes(DATA[:9000])
    reader = DirectFile(file)
    os.truncate(file, 5000)
    with pytest.raises(CheckpointError, match="9000 bytes then, 5000 now"):
        reader.read_into(4000, memory[:4000])


def test_threads_that_share_a_file_do_not_share_a_scratch(path: Path):
    file, wrong = DirectFile(path), []

    def read(seed: int) -> None:
        rng, into = np.random.default_rng(seed), memoryview(bytearray(70_000))
        for _ in range(40):
            offset, length = int(rng.integers(SIZE - 70_000)), int(rng.integers(1, 70_000))
            file.read_into(offset, into[:length])
            if into[:length] != DATA[offset : offset + length]:
                wrong.append(offset)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class TestModes:
    def test_each_way_reads_the_same_and_says_what_it_is(self, path: Path):
        identity = {path: RawFile(path).identity}
        for io in IO_MODES:
            file, into = open_files(identity, io), memoryview(bytearray(90_000))
            file.read_into(1234, into)
            assert into == DATA[1234:91_234]
            assert file.io_mode == ("direct" if io == "auto" else io)
            file.close()

    def test_small_reads_and_stand_ins_go_through_the_page_cache(self, path: Path):
        identity = {path: RawFile(path).identity}
        assert open_files(identity, usual_bytes=access.SMALL_READ_BYTES).io_mode == "direct"
        assert open_files(identity, usual_bytes=access.SMALL_READ_BYTES - 1).io_mode == "dropped"
        assert open_files(identity, "auto", FaultyReads()).io_mode == "buffered"
        assert open_files(identity, "direct", FaultyReads()).io_mode == "direct"

    def test_what_was_dropped_is_out_of_memory_and_what_was_kept_is_in(self, path: Path):
        def resident() -> float:
            if cached_pages(path) is None:
                pytest.skip("this system does not tell which pages are in memory")
            return float(np.mean(cached_pages(path)[:250]))

        identity = {path: RawFile(path).identity}
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        into = memoryview(bytearray(1 << 20))
        for io, at_least, at_most in (("direct", 0, 0.05), ("dropped", 0, 0.1), ("buffered", 0.95, 1)):
            open_files(identity, io).read_into(0, into)
            assert at_least <= resident() <= at_most, io

    @pytest.mark.wrong_types
    def test_an_unknown_way_is_refused_with_those_there_are(self, path: Path):
        with pytest.raises(LabError, match="io='mmap'; wanted auto, direct, dropped, buffered"):
            open_files({path: RawFile(path).identity}, "mmap")  # type: ignore[arg-type]

    def test_a_file_system_that_refuses_is_read_through_the_page_cache_and_says_so(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        def refused(fd: int) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        monkeypatch.setattr(direct, "_set_direct", refused)
        monkeypatch.setattr(access, "_serves_direct", {})
        identity = {path: RawFile(path).identity}
        assert open_files(identity).io_mode == "dropped"
        gc.collect()  # what tests before left to the collector must not end in between
        files = len(os.listdir("/proc/self/fd"))
        with pytest.raises(CheckpointError, match="refuses direct reads: Invalid argument"):
            open_files(identity, "direct")
        assert len(os.listdir("/proc/self/fd")) == files

    def test_a_memory_file_system_is_no_disk(self):
        if not Path("/dev/shm").is_dir():
            pytest.skip("no memory file system here")
        file = Path("/dev/shm") / f"moe-lab-test-{os.getpid()}"
        try:
            file.write_bytes(DATA[:9000])
            if direct.direct_alignment(RawFile(file).fd) is not None:
                pytest.skip("this memory file system serves direct reads")
            into = memoryview(bytearray(9000))
            reader = open_files({file: RawFile(file).identity})
            reader.read_into(0, into)
            assert (reader.io_mode, bytes(into)) == ("dropped", DATA[:9000])
            with pytest.raises(CheckpointError, match="serves no direct reads"):
                DirectFile(file)
        finally:
            file.unlink(missing_ok=True)


def cached_pages(path: Path) -> np.ndarray | None:
    """Whether each page of a file is in the page cache."""
    with open(path, "rb") as file:
        size = path.stat().st_size
        view = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
        told = np.zeros(-(-size // 4096), np.uint8)
        about = (np.frombuffer(view, np.uint8).ctypes.data, size, told.ctypes.data)
        code = ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, about))
    return told & 1 if code == 0 else None
