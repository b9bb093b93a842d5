"""GgufFile: tensors as the file stores them, read exactly or refused by name."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from moe_lab.checkpoint.gguf import GgufFile
from moe_lab.checkpoint.rawfile import RawFile
from moe_lab.errors import CheckpointError
from moe_lab.formats import QuantTensor
from tests.support.descriptors import open_descriptors
from tests.support.tiny_gguf import D_EXPERT, EXPERTS, raw_gguf, stored_weights, tensor_row, tiny_weights
from tests.support.tiny_gguf import write_tiny_qwen2moe as write_tiny

PLAIN = {
    "f32": (0, torch.float32), "f16": (1, torch.float16), "bf16": (30, torch.bfloat16), "f64": (28, torch.float64),
    "i8": (24, torch.int8), "i16": (25, torch.int16), "i32": (26, torch.int32), "i64": (27, torch.int64),
}  # fmt: skip


def refusal(call: Callable[[], object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        call()
    return caught.value


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("name", PLAIN)
def test_plain_types_come_back_in_their_dtype(tmp_path: Path, name: str) -> None:
    number, dtype = PLAIN[name]
    values = (torch.arange(12) - 5).to(dtype).reshape(3, 4)
    path = tmp_path / "plain.gguf"
    path.write_bytes(
        raw_gguf(rows=(tensor_row("w", (4, 3), number, 0),), data=values.view(torch.uint8).numpy().tobytes())
    )
    read = GgufFile(path).read("w")
    assert isinstance(read, torch.Tensor)
    assert read.dtype == dtype
    assert torch.equal(read, values)


def test_block_formats_come_back_as_their_bytes(tiny: Path) -> None:
    file = GgufFile(tiny)
    for name, stored in stored_weights(1).items():
        read = file.read(name)
        if isinstance(stored, QuantTensor):
            assert isinstance(read, QuantTensor)
            assert (read.format, read.shape) == (stored.format, stored.shape)
            assert torch.equal(read.data, stored.data)
        else:
            assert torch.equal(read, stored)


def test_agrees_with_the_gguf_packages_reader(tiny: Path) -> None:
    file = GgufFile(tiny)
    theirs = {t.name: t for t in gguf.GGUFReader(tiny).tensors}
    assert list(theirs) == list(file.tensors)
    for name, tensor in theirs.items():
        info = file.tensors[name]
        assert (info.offset, info.nbytes, info.ggml_type) == (
            tensor.data_offset,
            tensor.n_bytes,
            int(tensor.tensor_type),
        )
        assert info.shape == tuple(reversed([int(n) for n in tensor.shape]))
        assert np.array_equal(file.raw(name).numpy(), tensor.data.view(np.uint8).reshape(-1))


def test_expert_stack_is_expert_major(tiny: Path) -> None:
    """Expert e of a stack is the e-th run of equal length: what streaming relies on."""
    file = GgufFile(tiny)
    info, raw = file.tensors["blk.0.ffn_down_exps.weight"], file.raw("blk.0.ffn_down_exps.weight")
    one = raw.numel() // EXPERTS
    expert = stored_weights(0)["blk.0.ffn_down_exps.weight"][5]
    assert torch.equal(raw[5 * one : 6 * one], expert.data.reshape(-1))
    assert tiny.read_bytes()[info.offset + 5 * one :][:one] == expert.data.numpy().tobytes()
    assert info.shape[0] == EXPERTS
    assert info.shape[2] == D_EXPERT


class TestReads:
    def test_short_reads_are_put_together(self, tmp_path: Path) -> None:
        path = tmp_path / "short.gguf"
        data = np.random.default_rng(0).integers(0, 256, 96, np.uint8).tobytes()
        path.write_bytes(raw_gguf(rows=(tensor_row("w", (24,), 0, 0),), data=data))
        asked: list[int] = []

        def seven_bytes(fd: int, views: Sequence[memoryview], offset: int) -> int:
            asked.append(sum(len(view) for view in views))
            return os.preadv(fd, [views[0][:7]], offset)

        file = GgufFile(path, read_call=seven_bytes)
        asked.clear()
        assert file.raw("w").numpy().tobytes() == data
        assert asked == [96 - 7 * done for done in range(14)]

    @pytest.mark.wrong_types
    def test_no_call_asks_for_more_than_a_gib(self, tmp_path: Path) -> None:
        path = tmp_path / "big.bin"
        path.write_bytes(b"x")
        asked: list[int] = []

        def pretend(fd: int, views: Sequence[memoryview], offset: int) -> int:
            asked.append(len(views[0]))
            return len(views[0])

        # A view of 2.5 GiB over one byte: `pretend` never writes, so no memory is touched.
        view = memoryview(np.broadcast_to(np.zeros(1, np.uint8), (5 << 29,)))
        file = RawFile(path, pretend)
        file.read_into(0, _Unread(view))  # type: ignore[arg-type]
        assert sum(asked) == 5 << 29
        assert max(asked) == 1 << 30  # written out: Linux moves 2^31 - 4096 bytes at most, macOS fails above 2^31 - 1

    def test_read_error_names_file_tensor_and_byte(self, tiny: Path) -> None:
        broken = False

        def fails(fd: int, views: Sequence[memoryview], offset: int) -> int:
            if broken:
                raise OSError(5, "Input/output error")
            return os.preadv(fd, views, offset)

        file = GgufFile(tiny, read_call=fails)
        broken = True
        error = refusal(lambda: file.read("blk.0.ffn_gate_inp.weight"))
        assert error.reason == "unreadable"
        assert "blk.0.ffn_gate_inp.weight" in str(error)
        assert "Input/output error" in str(error)

    def test_end_inside_a_read_is_an_error_not_zeros(self, tiny: Path) -> None:
        ended = False

        def ends(fd: int, views: Sequence[memoryview], offset: int) -> int:
            return 0 if ended else os.preadv(fd, views, offset)

        file = GgufFile(tiny, read_call=ends)
        ended = True
        error = refusal(lambda: file.raw("blk.0.ffn_gate_inp.weight"))
        assert (error.reason, error.seen, error.wanted) == ("truncated", 0, 8192)


class _Unread:
    """Slices of a memoryview as plain lengths: the real one cannot slice a broadcast array cheaply."""

    def __init__(self, view: memoryview) -> None:
        self.nbytes = view.nbytes

    def __getitem__(self, index: slice) -> range:
        return range(self.nbytes)[index]


class TestChangesBehindOurBack:
    @pytest.mark.parametrize("damage", ["cut", "grown", "rewritten"])
    def test_changed_file_is_refused_at_the_next_read(self, tiny: Path, damage: str) -> None:
        file = GgufFile(tiny)
        with tiny.open("r+b") as handle:
            if damage == "cut":
                handle.truncate(2000)
            elif damage == "grown":
                handle.seek(0, os.SEEK_END)
                handle.write(b"x")
            else:
                handle.write(b"GGUF")
        os.utime(tiny, ns=(1, 1))
        error = refusal(lambda: file.read("blk.1.ffn_gate_inp.weight"))
        assert error.reason == "changed"

    def test_replaced_file_still_reads_the_opened_one(self, tiny: Path, tmp_path: Path) -> None:
        file = GgufFile(tiny)
        write_tiny(tmp_path / "other.gguf", layers=1)
        os.replace(tmp_path / "other.gguf", tiny)
        assert torch.equal(file.read("blk.1.ffn_gate_inp.weight"), tiny_weights(1)["blk.1.ffn_gate_inp.weight"])
        assert refusal(lambda: file.file.check_unchanged(path_too=True)).reason == "changed"


class TestRefusals:
    def test_missing_tensor_names_the_closest(self, tiny: Path) -> None:
        error = refusal(lambda: GgufFile(tiny).read("blk.0.ffn_gate_exp.weight"))
        assert error.reason == "missing tensor"
        assert "blk.0.ffn_gate_exps.weight" in str(error)

    def test_known_type_without_decoder_still_gives_its_bytes(self, tmp_path: Path) -> None:
        path = tmp_path / "iq.gguf"
        path.write_bytes(raw_gguf(rows=(tensor_row("w", (256, 2), 16, 0),), data=bytes(range(132))))
        file = GgufFile(path)
        error = refusal(lambda: file.read("w"))
        assert error.reason == "tensor type"
        assert "iq2_xxs" in str(error)
        assert "16" in str(error)
        assert file.raw("w").tolist() == list(range(132))

    def test_nvfp4_blocks_without_their_global_scale_are_not_the_weight(self, tmp_path: Path) -> None:
        path = tmp_path / "nv.gguf"
        rows = (
            tensor_row("a.weight", (64,), 40, 0),
            tensor_row("a.scale", (1,), 0, 64),
            tensor_row("b.weight", (64,), 40, 96),
        )
        path.write_bytes(raw_gguf(rows=rows, data=bytes(132)))
        file = GgufFile(path)
        for call in (lambda: file.read("a.weight"), lambda: file.check_complete("a.weight")):
            error = refusal(call)
            assert (error.reason, error.tensor, "a.scale" in str(error)) == ("scale names", "a.weight", True)
        file.check_complete("b.weight")
        assert file.read("b.weight").shape == (64,)
        assert file.raw("a.weight").numel() == 36

    @pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
    def test_what_is_no_file_is_refused_at_once(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "thing"
        {"missing": lambda: None, "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}[kind]()
        error = refusal(lambda: GgufFile(path))
        assert error.reason == ("not found" if kind == "missing" else "unreadable")
        assert str(path) in str(error)

    def test_descriptors_are_given_back_after_a_refusal(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.gguf"
        path.write_bytes(b"GGUF")
        before = open_descriptors()
        for _ in range(20):
            refusal(lambda: GgufFile(path))
        assert open_descriptors() == before

    def test_closed_file_refuses_reads(self, tiny: Path) -> None:
        with GgufFile(tiny) as file:
            kept = file.read("blk.0.ffn_gate_inp.weight")
        assert torch.equal(kept, tiny_weights(0)["blk.0.ffn_gate_inp.weight"])
        assert refusal(lambda: file.read("blk.0.ffn_gate_inp.weight")).reason == "unreadable"


class TestModelHash:
    def test_is_a_function_of_the_file_alone(self, tiny: Path, tmp_path: Path) -> None:
        copy = tmp_path / "elsewhere.gguf"
        copy.write_bytes(tiny.read_bytes())
        assert GgufFile(copy).model_hash == GgufFile(tiny).model_hash
        assert len(GgufFile(tiny).model_hash) == 64

    @pytest.mark.parametrize("part", ["metadata", "weights", "length"])
    def test_tells_models_apart(self, tiny: Path, part: str) -> None:
        before = GgufFile(tiny)
        data = bytearray(tiny.read_bytes())
        if part == "metadata":
            data[data.index(b"qwen2moe.block_count") + 24] ^= 1
        elif part == "weights":
            data[before.tensors["blk.1.ffn_gate_exps.weight"].offset + 17] ^= 1
        else:
            data += bytes(32)
        first = before.model_hash
        tiny.write_bytes(data)
        assert GgufFile(tiny).model_hash != first
