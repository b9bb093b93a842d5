"""Several requests in one call of the system's: right bytes, and every way in which a call may end."""

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_lab.errors import CheckpointError
from moe_lab.stream import direct, ring
from moe_lab.stream.access import serves_direct
from moe_lab.stream.direct import DirectFile
from moe_lab.stream.memory import host_block
from tests.support.descriptors import open_descriptors

KIB = 1024
SIZE = 256 * KIB
CONTENT = np.random.default_rng(3).integers(0, 256, SIZE, np.uint8).tobytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "data.bin"
    file.write_bytes(CONTENT)
    return file


@pytest.fixture
def mine() -> ring.Ring:
    found = ring.own_ring()
    if found is None:
        pytest.skip("the system gives no io_uring")
    return found


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0]


def block(nbytes: int = SIZE) -> memoryview:
    return host_block(nbytes).numpy().data


def test_every_request_comes_to_its_place(path: Path, mine: ring.Ring):
    fd, memory = os.open(path, os.O_RDONLY), block()
    draw = np.random.default_rng(5)
    for _ in range(30):  # the rings wrap several times
        order = draw.permutation(64)[: draw.integers(1, ring.MOST + 1)].tolist()
        asked = [(at * 4096, address(memory[at * 4096 : (at + 1) * 4096]), 4096) for at in order]
        assert mine.read(fd, asked) == [4096] * len(order)
        for at in order:
            assert memory[at * 4096 : (at + 1) * 4096] == CONTENT[at * 4096 : (at + 1) * 4096]
    os.close(fd)


def test_ends_and_errors_are_told_request_by_request(path: Path, mine: ring.Ring):
    fd, memory = os.open(path, os.O_RDONLY), block(3 * 4096)
    at = address(memory)
    told = mine.read(fd, [(SIZE - 100, at, 4096), (SIZE, at + 4096, 4096), (0, 8, 4096), (4096, at + 8192, 4096)])
    assert told == [100, 0, -errno.EFAULT, 4096]
    os.close(fd)
    assert mine.read(fd, [(0, at, 4096)]) == [-errno.EBADF]


@pytest.mark.parametrize("answers", [[-errno.EINTR, -errno.EAGAIN, 1, -errno.EINTR]], ids=["torn"])
def test_a_call_that_was_torn_goes_on(path: Path, mine: ring.Ring, monkeypatch: pytest.MonkeyPatch, answers: list[int]):
    """An interrupted wait, a queue that is full, a call that takes one request of three."""
    monkeypatch.setattr(ring, "_syscall", lambda: torn(answers))
    fd, memory = os.open(path, os.O_RDONLY), block()
    asked = [(at * 4096, address(memory) + at * 4096, 4096) for at in range(3)]
    assert mine.read(fd, asked) == [4096] * 3
    assert memory[: 3 * 4096] == CONTENT[: 3 * 4096]
    assert answers == []
    os.close(fd)


def test_a_refused_call_leaves_nothing_under_way(path: Path, mine: ring.Ring, monkeypatch: pytest.MonkeyPatch):
    answers = [2, -errno.ENOMEM]
    with monkeypatch.context() as patched:
        patched.setattr(ring, "_syscall", lambda: torn(answers))
        fd, memory = os.open(path, os.O_RDONLY), block()
        asked = [(at * 4096, address(memory) + at * 4096, 4096) for at in range(4)]
        with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):
            mine.read(fd, asked)
    assert mine.read(fd, asked) == [4096] * 4
    assert memory[: 4 * 4096] == CONTENT[: 4 * 4096]
    os.close(fd)


def torn(answers: list[int]) -> Callable[..., int]:
    """The system's call that gives these answers first: minus an errno, or takes that many requests alone."""
    real = ctypes.CDLL(None, use_errno=True).syscall
    real.restype = ctypes.c_long

    def call(number: int, *given: Any) -> int:
        if not answers:
            return real(number, *given)
        answer = answers.pop(0)
        if answer < 0:
            ctypes.set_errno(-answer)
            return -1
        fd, left, _, *more = given
        return real(number, fd, min(left, answer), 0, *more)

    return call


class TestFiles:
    """Through the readers' own class, where the file system serves direct reads."""

    @pytest.fixture
    def file(self, path: Path) -> DirectFile:
        if not serves_direct(path):
            pytest.skip("no direct reads here")
        return DirectFile(path)

    @pytest.mark.parametrize("request_kib", [4, 16, 64, 100])
    def test_a_part_in_several_requests_is_one_call(
        self, file: DirectFile, mine: ring.Ring, monkeypatch: pytest.MonkeyPatch, request_kib: int
    ):
        monkeypatch.setattr(direct.DirectFile, "_whole", lambda *given: pytest.fail("a call for one request"))
        view = block()
        file.read_into(8192, view[: SIZE - 8192], request_bytes=request_kib * KIB)
        assert view[: SIZE - 8192] == CONTENT[8192:]

    @pytest.mark.parametrize("came", [0, 4096, -errno.EIO, -errno.EINVAL], ids=["nothing", "short", "EIO", "EINVAL"])
    def test_what_did_not_come_is_read_again_by_itself(
        self, file: DirectFile, mine: ring.Ring, monkeypatch: pytest.MonkeyPatch, came: int
    ):
        real = ring.Ring.read
        monkeypatch.setattr(ring.Ring, "read", lambda self, fd, asked: [came, *real(self, fd, asked)[1:]])
        view = block()
        file.read_into(0, view, request_bytes=64 * KIB)
        assert view == CONTENT

    def test_the_files_early_end_is_said_as_ever(self, file: DirectFile, path: Path):
        os.truncate(path, SIZE - 64 * KIB)
        with pytest.raises(CheckpointError, match="262144 bytes then, 196608 now") as caught:
            file.read_into(0, block(), request_bytes=32 * KIB)
        assert caught.value.reason == "changed"

    def test_without_a_ring_each_request_is_a_call(self, file: DirectFile, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(direct, "own_ring", lambda: None)
        view = block()
        file.read_into(0, view, request_bytes=32 * KIB)
        assert view == CONTENT


def test_rings_leave_no_descriptor(mine: ring.Ring):
    before = open_descriptors()
    for _ in range(50):
        ring.Ring()
    assert open_descriptors() == before


def test_a_system_without_one_is_asked_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ring, "_own", type("Own", (), {})())
    monkeypatch.setattr(ring, "_syscall", lambda: torn([-errno.EPERM]))
    assert ring.own_ring() is None
    monkeypatch.setattr(ring, "Ring", lambda: pytest.fail("asked again"))
    assert ring.own_ring() is None


def test_a_kernel_that_knows_no_quiet_rings_gives_a_plain_one(path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    real = ring._syscall()

    def old(number: int, *about: object) -> int:
        if number == ring._SETUP:
            asked.append(about[1][2])  # type: ignore[index]
            if asked[-1]:
                ctypes.set_errno(errno.EINVAL)
                return -1
        return real(number, *about)

    monkeypatch.setattr(ring, "_syscall", lambda: old)
    try:
        made = ring.Ring()
    except OSError:
        pytest.skip("the system gives no io_uring")
    assert asked == [ring._QUIET, 0]
    into = np.zeros(4096, np.uint8)
    with path.open("rb") as file:
        assert made.read(file.fileno(), [(4096, into.ctypes.data, 4096)]) == [4096]
    assert into.tobytes() == path.read_bytes()[4096:8192]
    made.close()
