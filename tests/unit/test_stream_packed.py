"""Packed files: the model's bytes, one aligned read an expert, checked; written whole or not at all."""

import errno
import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_lab as lab
from moe_lab.checkpoint.expert_slice import ExpertSlice
from moe_lab.errors import CheckpointError, LabError
from moe_lab.stream import verify
from moe_lab.stream.access import serves_direct
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.manifest import MAGIC
from moe_lab.stream.pack import pack
from moe_lab.stream.packed import PackedSource, wrong_rows
from moe_lab.stream.source import ExpertSource
from tests.support.expert_files import CountingReads, held, wanted, write_experts
from tests.support.faulty_disk import bound, usable


@pytest.fixture
def source(tmp_path: Path) -> ExpertSource:
    """Two layers; layer 1's experts are wider than a block of the disk."""
    shapes = {0: ((3, 5), (3, 5), (5, 7)), 1: ((40, 50), (40, 50), (50, 41))}
    made = write_experts(tmp_path / "model.bin", shapes=shapes.__getitem__)
    made.model_hash = "cafe"
    return made


@pytest.fixture
def packed(source: ExpertSource, tmp_path: Path) -> PackedSource:
    return PackedSource(pack(source, tmp_path / "x.experts").path)


class TestBytes:
    @pytest.mark.parametrize("io", ["auto", "direct", "dropped", "buffered"])
    @pytest.mark.parametrize("slots", [1, 3, 16], ids="slots{}".format)
    def test_every_expert_is_the_models(self, packed: PackedSource, io: Any, slots: int):
        if io == "direct" and not serves_direct(packed.path):
            pytest.skip("this file system serves no direct reads")
        with bound(packed, slots=slots, io=io, verify="strict") as cache:
            usable(cache, packed)
            assert cache.verifier is not None
            assert cache.verifier.checked == cache.misses
            assert cache.bytes_read == 8 * (packed.expert_nbytes(0) + packed.expert_nbytes(1))

    def test_each_expert_is_one_read_at_a_page(self, packed: PackedSource):
        reads = CountingReads()
        with bound(packed.reading_through(reads), slots=16) as cache:
            usable(cache, packed)
        assert len(reads.calls) == 16
        assert all(offset % 4096 == 0 for offset, _ in reads.calls)

    def test_counters_are_those_of_the_model_file(self, source: ExpertSource, packed: PackedSource):
        counts = []
        for one in (source, packed):
            with bound(one, slots=3) as cache:
                for experts in ([0, 1, 2], [2, 3], [0, 3, 7], [2]):
                    cache.lease(one, 1, experts).release()
                counts.append((cache.hits, cache.misses, cache.bytes_read))
        assert counts[0] == counts[1]

    def test_no_slot_of_a_packed_cache_begins_between_pages(self, packed: PackedSource):
        with bound(packed, slots=3) as cache:
            assert cache._arena.tensor.stride(0) % 4096 == 0  # type: ignore[union-attr]
            assert cache._arena.tensor.data_ptr() % 4096 == 0  # type: ignore[union-attr]

    @pytest.mark.parametrize("order", [{0: [7, 0, 6, 1, 5, 2, 4, 3]}, {1: list(reversed(range(8)))}], ids=["0", "1"])
    def test_an_order_moves_rows_and_no_values(self, source: ExpertSource, tmp_path: Path, order: dict):
        moved = PackedSource(pack(source, tmp_path / "m.experts", order=order, order_name="mine").path)
        assert moved.manifest.order == "mine"
        for layer in (0, 1):
            places = moved.manifest.layers[layer].offsets
            assert sorted(range(8), key=places.__getitem__) == order.get(layer, list(range(8)))
        with bound(moved, slots=16, verify="strict") as cache:
            usable(cache, moved)

    def test_a_model_streams_from_its_packed_file_bit_for_bit(self, tmp_path: Path):
        ckpt = lab.open(lab.sample())
        path = pack(ckpt.expert_source, tmp_path / "lab.experts").path
        x = torch.randn(2, ckpt.spec.d_model, generator=torch.Generator().manual_seed(1))  # type: ignore[union-attr]
        with lab.open(lab.sample(), packed=path) as other, ExpertCache(slots=3, verify="sampled") as cache:
            streamed = other.layer(2, cache=cache)(x, "reference")
            assert torch.equal(streamed.out, ckpt.layer(2)(x, "reference").out)
            assert isinstance(other.expert_source, PackedSource)
            assert cache.misses > 3

    def test_parts_that_are_not_the_models_are_refused(self, source: ExpertSource, packed: PackedSource):
        packed.check_parts(source)
        packed.path.write_bytes(changed(lambda v: layer(v)["parts"][0].update(shape=[3, 6]))(packed.path.read_bytes()))
        with pytest.raises(CheckpointError, match="layer 0 is not laid out as in") as caught:
            PackedSource(packed.path).check_parts(source)
        assert caught.value.reason == "part mismatch"

    def test_scales_beside_their_codes_come_along(self, tmp_path: Path):
        file = tmp_path / "scaled.bin"
        file.write_bytes(bytes(range(256)) * 64)
        from moe_lab.checkpoint.expert_slice import Beside

        def scaled(name: str, at: int) -> ExpertSlice:
            codes, scales = 2 * 32 // 2, 2
            beside = Beside("scales", f"{name}.s", torch.uint8, (2, 1), tuple((file, at + 500 + e * 2) for e in (0, 1)))
            assert beside.nbytes == scales
            return ExpertSlice(name, "mxfp4_oss", codes, (2, 2, 32), ((file, at), (file, at + 100)), (beside,))

        source = ExpertSource(file, {4: [scaled(n, i * 1111) for i, n in enumerate("gud")]}, model_hash="s")
        packed = PackedSource(pack(source, tmp_path / "s.experts").path)
        assert packed.parts(4) == source.parts(4)
        contents = []
        for one in (source, packed):
            with bound(one, slots=2) as cache, cache.lease(one, 4, [1, 0]) as lease:
                views = [lease.views(p)[lease.slots.long()] for part in one.parts(4) for p in part.all]
                contents.append([view.numpy().tobytes() for view in views])
        assert contents[0] == contents[1]
        assert len(contents[0]) == 6


class TestChecks:
    def flip(self, packed: PackedSource, layer: int, expert: int, part: int = 0) -> PackedSource:
        """The packed file with one bit of one expert wrong."""
        data = bytearray(packed.path.read_bytes())
        run = packed.geometry(layer).runs[part]
        data[run.starts[expert] + 5] ^= 1
        packed.path.write_bytes(data)
        return PackedSource(packed.path)

    def test_strict_never_serves_a_wrong_row_and_the_others_stay_right(self, packed: PackedSource):
        broken = self.flip(packed, 1, 6, part=2)
        with bound(broken, slots=4, verify="strict") as cache:
            for _ in range(2):
                with pytest.raises(CheckpointError, match=r"layer 1 expert 6: .*checksum") as caught:
                    cache.lease(broken, 1, [5, 6])
                assert caught.value.reason == "checksum"
            with cache.lease(broken, 1, [5, 7]) as lease:
                assert held(lease) == wanted(broken, 1, [5, 7])
            assert (cache.verifier.wrong, cache._partitions[0].held) == (2, 0)  # type: ignore[union-attr]

    def test_sampled_checks_one_in_sixteen_and_all_after_a_mismatch(self, packed: PackedSource):
        broken = self.flip(packed, 0, 0)
        with bound(broken, slots=1, verify="sampled") as cache:
            with pytest.raises(CheckpointError, match="layer 0 expert 0"):  # the first one is among the sample
                cache.lease(broken, 0, [0])
            for expert in range(1, 8):
                cache.lease(broken, 0, [expert]).release()
            assert cache.verifier.checked == 8  # type: ignore[union-attr]
        with bound(packed := PackedSource(broken.path), slots=1, verify="sampled") as cache:
            for expert in [1, 2, 3, 4, 5, 6, 7] * 7:
                cache.lease(packed, 0, [expert]).release()
            assert cache.verifier.checked == -(-49 // verify.SAMPLE)  # type: ignore[union-attr]
            assert cache.verifier.ms > 0  # type: ignore[union-attr]

    def test_off_checks_nothing(self, packed: PackedSource):
        with bound(packed, slots=16) as cache:
            usable(cache, packed)
            assert cache.verifier.checked == 0  # type: ignore[union-attr]

    def test_a_model_file_has_nothing_to_check_against(self, source: ExpertSource):
        with (
            ExpertCache(slots=2, verify="strict") as cache,
            pytest.raises(LabError, match=r"no checksums .* moe-lab pack"),
        ):
            cache.bind(source, "cpu")

    def test_every_wrong_row_is_found_gaps_included(self, packed: PackedSource):
        assert list(wrong_rows(packed)) == []
        broken = self.flip(self.flip(packed, 0, 3, part=1), 1, 7)
        assert list(wrong_rows(broken)) == [(0, 3), (1, 7)]
        data = bytearray(packed.path.read_bytes())
        data[packed.manifest.layers[0].offsets[5] + 100] ^= 1  # between gate and up
        packed.path.write_bytes(data)
        assert list(wrong_rows(PackedSource(packed.path))) == [(0, 3), (0, 5), (1, 7)]

    def test_the_model_is_asked_for_by_its_hash(self, packed: PackedSource):
        packed.check_model("cafe")
        with pytest.raises(CheckpointError, match="packed from another model") as caught:
            packed.check_model("f00d")
        assert caught.value.reason == "part mismatch"
        with pytest.raises(CheckpointError, match="packed from another model"):
            lab.open(lab.sample(), packed=packed.path)


class TestWriting:
    def left(self, folder: Path) -> list[str]:
        return sorted(p.name for p in folder.iterdir() if p.name != "model.bin")

    @pytest.mark.parametrize("what", ["posix_fallocate", "fsync"])
    def test_a_full_disk_leaves_nothing_behind(
        self, source: ExpertSource, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
    ):
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, what, full)
        with pytest.raises(LabError, match=r"cannot write .*x\.experts: No space left on device"):
            pack(source, tmp_path / "x.experts")
        assert self.left(tmp_path) == []

    def test_what_was_there_stays_until_the_new_file_is_whole(self, source: ExpertSource, tmp_path: Path):
        out = tmp_path / "x.experts"
        out.write_bytes(MAGIC + b"old")

        def stop(done: int, rows: int) -> None:
            if done == 11:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pack(source, out, told=stop)
        assert (self.left(tmp_path), out.read_bytes()) == (["x.experts"], MAGIC + b"old")
        files = len(os.listdir("/proc/self/fd"))
        pack(source, out)
        assert list(wrong_rows(PackedSource(out))) == []
        assert len(os.listdir("/proc/self/fd")) == files

    def test_a_model_that_cannot_be_read_leaves_nothing(self, source: ExpertSource, tmp_path: Path):
        def broken(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with pytest.raises(CheckpointError, match="Input/output error"):
            pack(source.reading_through(broken), tmp_path / "x.experts")
        assert self.left(tmp_path) == []

    @pytest.mark.parametrize("order", [[0, 1], [0] * 8, list(range(1, 9))], ids=["few", "twice", "foreign"])
    def test_an_order_that_is_none_is_refused(self, source: ExpertSource, tmp_path: Path, order: list[int]):
        with pytest.raises(LabError, match=r"order of layer 1 .* not each of its 8 once"):
            pack(source, tmp_path / "x.experts", order={1: order})

    def test_the_same_model_gives_the_same_file(self, source: ExpertSource, tmp_path: Path):
        files = [pack(source, tmp_path / name).path.read_bytes() for name in ("a.experts", "b.experts")]
        assert files[0] == files[1]

    def test_a_nameless_source_is_refused(self, tmp_path: Path):
        with pytest.raises(LabError, match="by its hash"):
            pack(write_experts(tmp_path / "y.bin"), tmp_path / "x.experts")


def layer(value: dict) -> dict:
    """Layer 0 of a manifest."""
    return value["layers"]["0"]


def changed(change: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    """The file with another manifest."""

    def rewrite(data: bytes) -> bytes:
        length = int.from_bytes(data[8:16], "little")
        value = json.loads(data[16 : 16 + length])
        change(value)
        text = json.dumps(value, separators=(",", ":")).encode()
        room = -(-(16 + length) // 4096) * 4096 - 16
        assert len(text) <= room
        return MAGIC + len(text).to_bytes(8, "little") + text + bytes(room - len(text)) + data[16 + room :]

    return rewrite


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "empty": (lambda d: b"", "magic", "begins with ''"),
    "a-gguf": (lambda d: b"GGUF" + d[4:], "magic", "begins with 'GGUF"),
    "cut-in-head": (lambda d: d[:12], "truncated", "has 12 bytes, its manifest ends"),
    "long-manifest": (lambda d: d[:8] + (1 << 62).to_bytes(8, "little") + d[16:], "truncated", "its manifest ends"),
    "cut-in-rows": (lambda d: d[:-4096], "truncated", "is cut short: it has"),
    "cut-before-its-rows": (lambda d: d[:8192], "truncated", "its last row ends at byte"),
    "no-json": (lambda d: d[:16] + b"x" + d[17:], "manifest", "is not JSON"),
    "a-list": (lambda d: MAGIC + (2).to_bytes(8, "little") + b"[]" + d[18:], "manifest", "does not describe"),
    "newer": (changed(lambda v: v.update(version=2)), "manifest", "is of version 2"),
    "no-layers": (changed(lambda v: v.update(layers={})), "manifest", "has no layers"),
    "no-hash": (changed(lambda v: v.pop("model_hash")), "manifest", "model_hash"),
    "hash-number": (changed(lambda v: v.update(model_hash=3)), "manifest", "else than text"),
    "odd-offset": (changed(lambda v: layer(v)["offsets"].__setitem__(3, 8193)), "manifest", "8193"),
    "in-the-head": (changed(lambda v: layer(v)["offsets"].__setitem__(0, 0)), "manifest", "from 1 to"),
    "few-sums": (changed(lambda v: layer(v)["crc32"].pop()), "manifest", "8 rows and 7 checksums"),
    "same-row": (changed(lambda v: layer(v).update(offsets=[layer(v)["offsets"][0]] * 8)), "manifest", "puts a row"),
    "huge-experts": (changed(lambda v: layer(v).update(experts=1 << 40)), "manifest", "no whole number"),
    "true-experts": (changed(lambda v: layer(v).update(experts=True)), "manifest", "no whole number"),
    "format": (changed(lambda v: layer(v)["parts"][0].update(format="q9_z")), "manifest", "q9_z"),
    "shape": (changed(lambda v: layer(v)["parts"][0].update(shape=[300, 5])), "manifest", "rows of"),
    "wrap": (changed(lambda v: layer(v)["parts"][0].update(shape=[1 << 62, 4])), "manifest", "no whole number"),
    "two-parts": (changed(lambda v: layer(v)["parts"].pop()), "manifest", "2 slices"),
    "negative-layer": (changed(lambda v: v["layers"].update({"-1": v["layers"].pop("0")})), "manifest", "-1"),
    "sum-text": (changed(lambda v: layer(v)["crc32"].__setitem__(0, "x")), "manifest", "no whole number"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_by_name(packed: PackedSource, case: str):
    change, reason, told = BROKEN[case]
    packed.path.write_bytes(change(packed.path.read_bytes()))
    with pytest.raises(CheckpointError) as caught:
        PackedSource(packed.path)
    assert (caught.value.reason, caught.value.file) == (reason, str(packed.path))
    assert told in str(caught.value)


def test_a_file_changed_after_opening_is_refused(packed: PackedSource):
    with bound(packed, slots=2) as cache:
        packed.path.write_bytes(packed.path.read_bytes())
        with pytest.raises(CheckpointError, match="changed since it was opened"):
            cache.lease(packed, 0, [1])


def test_the_checksums_are_the_plain_ones(packed: PackedSource):
    data = packed.path.read_bytes()
    rows = packed.manifest.layers[1]
    for expert, at in enumerate(rows.offsets):
        assert zlib.crc32(data[at : at + rows.row_bytes]) == packed.checksum(1, expert)


@pytest.mark.parametrize("through", ["itself", "a link"])
def test_what_is_no_packed_file_is_never_replaced(tmp_path: Path, through: str) -> None:
    """`moe-lab pack m.gguf -o m.gguf` once left nothing of the model."""
    model = tmp_path / "m.gguf"
    model.write_bytes(lab.sample().read_bytes())
    named = model
    if through == "a link":
        named = tmp_path / "link.gguf"
        named.symlink_to(model)
    before = model.read_bytes()
    with lab.open(named) as ckpt, pytest.raises(LabError, match="exists and is no packed file"):
        pack(ckpt.expert_source, model)
    assert model.read_bytes() == before
