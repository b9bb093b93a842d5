"""Faults that the kernel itself reports, injected with strace into this very process: through every way of reading."""

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe_lab.errors import CheckpointError
from moe_lab.stream.access import IoMode, serves_direct
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.pack import pack
from moe_lab.stream.packed import PackedSource
from tests.support.expert_files import held, wanted, write_experts
from tests.support.faulty_disk import usable

SHAPES = ((40, 50), (40, 50), (50, 41))  # f32: a row of 24,596 bytes


@contextmanager
def injected(fault: str, log: Path) -> Iterator[None]:
    """Inside the block the kernel itself fails this process's `preadv` as strace's rule says."""
    calls = "preadv,preadv2"
    rules = ["-e", f"trace={calls}", "-e", f"inject={calls}:{fault}"]
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1 & (1 << 64) - 1), 0, 0, 0)  # a child may trace its parent
    command = ["strace", "-f", "-p", str(os.getpid()), "-o", str(log), *rules]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        said = strace.stderr.readline()
        if "attached" not in said:
            strace.kill()
            pytest.skip(f"strace may not trace here: {said.strip()}")
        try:
            yield
        finally:
            strace.send_signal(signal.SIGINT)
    assert "INJECTED" in log.read_text() or "DELAYED" in log.read_text(), "no fault came: the test tested nothing"


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: kernel faults are not injected")
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("error=EIO:when=2", None),
        ("error=EIO:when=2+", "layer 0 expert 1: reading at byte .* failed: Input/output error"),
        ("error=EINTR:when=2", None),
        ("delay_enter=200ms:when=2", None),
        ("retval=4096:when=2", "layer 0 expert 1: .*checksum"),  # a read that claims bytes which never came
    ],
    ids=["one-EIO", "only-EIO", "EINTR", "slow", "short-and-wrong"],
)
@pytest.mark.parametrize("io", ["direct", "dropped", "buffered"])
def test_faults_of_the_kernel_itself(tmp_path: Path, io: IoMode, fault: str, told: str | None):
    source = write_experts(tmp_path / "x.bin", shapes=lambda _: SHAPES)
    if io == "direct" and not serves_direct(source.path):
        pytest.skip("this file system serves no direct reads")
    source.model_hash = "cafe"
    packed = PackedSource(pack(source, tmp_path / "x.experts").path)
    with ExpertCache(slots=3, threads=1, io=io, verify="strict") as cache:
        with injected(fault, tmp_path / "log"):
            cache.bind(packed, "cpu")  # its thread is born under the rule, which counts a thread's calls
            cache.lease(packed, 0, [0]).release()
            if told is None:
                with cache.lease(packed, 0, [1]) as lease:
                    assert held(lease) == wanted(packed, 0, [1])
                    assert "delay" not in fault or lease.wait_ms >= 200
            else:
                with pytest.raises(CheckpointError, match=told):
                    cache.lease(packed, 0, [1])
        usable(cache, packed)
