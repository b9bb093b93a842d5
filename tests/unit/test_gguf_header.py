"""The GGUF header parser: what it accepts, what it refuses, and that refusing costs nothing."""

import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from moe_lab.checkpoint.ggml_types import FILE_TYPES, GGML_TYPES
from moe_lab.checkpoint.gguf_header import GgufHeader, read_header
from moe_lab.checkpoint.gguf_values import MAX_DEPTH
from moe_lab.checkpoint.header_bytes import MAX_ELEMENTS, MAX_ENTRIES, MAX_HEADER_BYTES
from moe_lab.checkpoint.rawfile import RawFile
from moe_lab.errors import CheckpointError
from tests.support.tiny_gguf import entry, raw_gguf, tensor_row, text

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10


def parse(tmp_path: Path, data: bytes, *, size: int | None = None) -> GgufHeader:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    if size is not None:
        with path.open("r+b") as handle:
            handle.truncate(size)
    return read_header(RawFile(path))


def refused(tmp_path: Path, data: bytes, *, size: int | None = None) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        parse(tmp_path, data, size=size)
    assert "\n" not in str(caught.value)
    assert "model.gguf" in str(caught.value)
    return caught.value


def nested(depth: int) -> bytes:
    """An array nested `depth` deep that ends in one byte."""
    return struct.pack("<IQ", ARRAY, 1) * (depth - 1) + struct.pack("<IQB", U8, 1, 7)


class TestTypeTable:
    def test_sizes_equal_the_gguf_packages(self) -> None:
        # The package still gives Q8_1 the 40 bytes of its first layout (two floats); ggml stores two halves: 36.
        theirs = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items() if kind.name != "Q8_1"}
        ours = {number: (kind.block, kind.block_bytes) for number, kind in GGML_TYPES.items()}
        assert {number: ours.get(number) for number in theirs} == theirs

    def test_names_equal_the_gguf_packages(self) -> None:
        theirs = {int(kind): kind.name.lower() for kind in gguf.GGMLQuantizationType}
        assert {number: GGML_TYPES[number].name for number in theirs} == theirs

    def test_file_labels_name_types_of_the_table_and_of_the_label(self) -> None:
        known = {kind.name for kind in GGML_TYPES.values()}
        for number, name in FILE_TYPES.items():
            label = gguf.LlamaFileType(number).name.lower()
            assert name in known
            assert name.split("_")[0] in label, f"{label} is not a {name} label"


class TestMetadata:
    def test_every_value_type_comes_back_as_written(self, tmp_path: Path) -> None:
        path = tmp_path / "kinds.gguf"
        writer = gguf.GGUFWriter(path, "lab")
        values = {"u8": 200, "i8": -3, "u16": 60000, "i16": -30000, "u32": 4_000_000_000, "i32": -2_000_000_000}
        values |= {
            "u64": 2**63 + 1,
            "i64": -(2**62),
            "f32": 0.5,
            "f64": 1e-300,
            "yes": True,
            "no": False,
            "s": "naïve\n",
        }
        adders = {
            "u8": writer.add_uint8, "i8": writer.add_int8, "u16": writer.add_uint16, "i16": writer.add_int16,
            "u32": writer.add_uint32, "i32": writer.add_int32, "u64": writer.add_uint64, "i64": writer.add_int64,
            "f32": writer.add_float32, "f64": writer.add_float64, "yes": writer.add_bool, "no": writer.add_bool,
            "s": writer.add_string,
        }  # fmt: skip
        for key, value in values.items():
            adders[key](key, value)
        lists = {"words": ["a", "", "ß" * 40], "numbers": [1, -2, 3], "reals": [0.25, -1.5], "flags": [True, False]}
        for key, value in lists.items():
            writer.add_array(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        found = read_header(RawFile(path)).metadata
        assert {key: found[key] for key in values} == values
        assert {key: found[key] for key in lists} == lists
        assert {type(found[key]) for key in ("yes", "u8", "f32", "s")} == {bool, int, float, str}

    def test_version_2_reads_as_version_3(self, tmp_path: Path) -> None:
        data = raw_gguf((entry("k", U32, struct.pack("<I", 9)),), version=2)
        assert parse(tmp_path, data).metadata == {"k": 9}

    def test_value_that_is_not_utf8_is_shown_escaped(self, tmp_path: Path) -> None:
        assert parse(tmp_path, raw_gguf((entry("k", STRING, text(b"a\xff")),))).metadata["k"] == "a\\xff"

    @pytest.mark.parametrize("depth", [1, MAX_DEPTH])
    def test_nested_arrays_load_to_the_limit(self, tmp_path: Path, depth: int) -> None:
        value = parse(tmp_path, raw_gguf((entry("k", ARRAY, nested(depth)),))).metadata["k"]
        for _ in range(depth - 1):
            assert len(value) == 1
            value = value[0]
        assert value == [7]

    def test_one_level_more_is_refused(self, tmp_path: Path) -> None:
        assert refused(tmp_path, raw_gguf((entry("k", ARRAY, nested(MAX_DEPTH + 1)),))).reason == "nesting"

    @pytest.mark.parametrize("count", [1, 3, 2000, 40_000])
    def test_long_lists_of_texts_survive_the_window_edges(self, tmp_path: Path, count: int) -> None:
        words = [("x" * (i % 97)) + str(i) for i in range(count)]
        body = struct.pack("<IQ", STRING, count) + b"".join(map(text, words))
        long_text = "y" * 700_000
        data = raw_gguf(
            (entry("words", ARRAY, body), entry("long", STRING, text(long_text)), entry("end", U8, b"\x05"))
        )
        assert parse(tmp_path, data).metadata == {"words": words, "long": long_text, "end": 5}


REFUSALS = {
    "duplicate-key": (raw_gguf((entry("k", U8, b"\x01"), entry("k", U8, b"\x02"))), "duplicate", "'k'"),
    "bool-2": (raw_gguf((entry("k", BOOL, b"\x02"),)), "value", "2"),
    "bool-in-array-3": (raw_gguf((entry("k", ARRAY, struct.pack("<IQ", BOOL, 2) + b"\x00\x03"),)), "value", "3"),
    "key-not-utf8": (raw_gguf((entry(b"\xff\xfe", U8, b"\x01"),)), "text", "UTF-8"),
    "key-of-65536-bytes": (raw_gguf((entry("k" * 65536, U8, b"\x01"),)), "text", "65536"),
    "name-not-utf8": (raw_gguf(rows=(tensor_row(b"\xc3\x28", (4,), 0, 0),), data=bytes(16)), "text", "UTF-8"),
    "name-of-1025-bytes": (raw_gguf(rows=(tensor_row("n" * 1025, (4,), 0, 0),), data=bytes(16)), "text", "1025"),
    "version-1": (raw_gguf(version=1), "version", "1"),
    "version-4": (raw_gguf(version=4), "version", "4"),
    "big-endian": (raw_gguf(version=3 << 24), "version", "big-endian"),
    "count-fits-no-file": (raw_gguf()[:16] + struct.pack("<Q", MAX_ENTRIES + 1), "count", str(MAX_ENTRIES + 1)),
    "count-past-a-cut": (raw_gguf()[:16] + struct.pack("<Q", 5), "truncated", "cut short"),
    "text-longer-than-file": (raw_gguf((entry("k", STRING, struct.pack("<Q", 2**63)),)), "truncated", str(2**63)),
    "array-cut-inside": (raw_gguf((entry("k", ARRAY, struct.pack("<IQ", U64, 3) + bytes(16)),)), "truncated", "'k'"),
    "two-tensors-one-name": (
        raw_gguf(rows=(tensor_row("w", (4,), 0, 0), tensor_row("w", (4,), 0, 32)), data=bytes(48)), "duplicate", "'w'",
    ),
    "offset-unaligned": (raw_gguf(rows=(tensor_row("w", (4,), 0, 8),), data=bytes(64)), "offset", "8"),
    "offset-2-63": (raw_gguf(rows=(tensor_row("w", (4,), 0, 2**63),), data=bytes(64)), "truncated", "'w'"),
    "same-bytes-twice": (
        raw_gguf(rows=(tensor_row("v", (16,), 0, 0), tensor_row("w", (4,), 0, 32)), data=bytes(64)), "overlap", "'v'",
    ),
    "unknown-type-on-a-neighbour": (
        raw_gguf(rows=(tensor_row("v", (16,), 0, 0), tensor_row("w", (4,), 99, 32)), data=bytes(64)), "overlap", "'w'",
    ),
    "dimension-0": (raw_gguf(rows=(tensor_row("w", (4, 0), 0, 0),), data=bytes(16)), "shape", "[0, 4]"),
    "alignment-negative": (raw_gguf((entry("general.alignment", I32, struct.pack("<i", -32)),)), "alignment", "-32"),
    "alignment-float": (raw_gguf((entry("general.alignment", F32, struct.pack("<f", 32)),)), "alignment", "32.0"),
    "safetensors": (struct.pack("<Q", 40) + b'{"a":{"dtype":"F32"}}' + bytes(40), "magic", "safetensors"),
    "lfs-pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "magic", "pointer"),
    "web-page": (b"<!doctype html><html>no such file</html>", "magic", "web page"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal(tmp_path: Path, case: str) -> None:
    data, reason, said = REFUSALS[case]
    error = refused(tmp_path, data)
    assert error.reason == reason
    assert said in str(error)


def one_row_too_few() -> bytes:
    """Three rows, a count of two: what is left of the table looks like data."""
    rows = tuple(tensor_row(name, (8,), 0, 32 * i) for i, name in enumerate(("a", "b", "c")))
    data = bytearray(raw_gguf(rows=rows, data=bytes(range(1, 97))))
    data[8] = 2
    return bytes(data)


class TestUnclaimedBytes:
    def test_row_that_the_count_leaves_out(self, tmp_path: Path) -> None:
        error = refused(tmp_path, one_row_too_few())
        assert error.reason == "count"
        assert "not zero" in str(error)

    def test_the_same_where_no_padding_shows_it(self, tmp_path: Path) -> None:
        """The header ends on the boundary, so that the row left out is read as data; the end of the file then shows."""
        rows = (tensor_row("n" * 11, (8,), 0, 0), tensor_row("b", (8,), 0, 32))
        short = 24 + len(rows[0]) + len(entry("", U8, b"\1"))
        filler = entry("k" * (-short % 32), U8, b"\1")
        data = bytearray(raw_gguf((filler,), rows, bytes(range(1, 65))))
        data[8] = 1
        error = refused(tmp_path, bytes(data))
        assert (error.reason, "'nnnnnnnnnnn'" in str(error)) == ("size", True)

    @pytest.mark.parametrize(("tail", "loads"), [(bytes(200), True), (b"\0" * 31 + b"x", False), (b"x", False)])
    def test_bytes_after_the_last_tensor(self, tmp_path: Path, tail: bytes, loads: bool) -> None:
        data = raw_gguf(rows=(tensor_row("w", (9,), 0, 0),), data=bytes(36) + tail)
        if loads:
            assert parse(tmp_path, data).tensors["w"].nbytes == 36
        else:
            assert refused(tmp_path, data).reason == "size"

    def test_nothing_is_known_behind_an_unknown_type(self, tmp_path: Path) -> None:
        data = raw_gguf(rows=(tensor_row("w", (9,), 77, 0),), data=b"any bytes at all")
        assert parse(tmp_path, data).tensors["w"].nbytes is None


def test_hostile_names_are_escaped_in_messages(tmp_path: Path) -> None:
    error = refused(tmp_path, raw_gguf(rows=(tensor_row("a\n\x1b[31mb", (4,), 0, 8),), data=bytes(64)))
    assert "\x1b" not in str(error)


@pytest.mark.parametrize("value", [1, 8, 16, 64, 4096])
def test_alignment_moves_the_data(tmp_path: Path, value: int) -> None:
    entries = (entry("general.alignment", U32, struct.pack("<I", value)),)
    rows = (tensor_row("a", (1,), 0, 0), tensor_row("b", (1,), 0, max(4, value) // value * value))
    header = parse(tmp_path, raw_gguf(entries, rows, bytes(max(4, value) + 4), align=value))
    assert header.data_start % value == 0
    assert header.tensors["b"].offset - header.tensors["a"].offset == max(4, value)


def test_shape_is_in_numpy_order_and_sizes_follow_the_type(tmp_path: Path) -> None:
    header = parse(tmp_path, raw_gguf(rows=(tensor_row("w", (512, 3, 4), 10, 0),), data=bytes(2 * 84 * 12)))
    info = header.tensors["w"]
    assert (info.shape, info.format, info.nbytes, info.ggml_type) == ((4, 3, 512), "q2_k", 2 * 84 * 12, 10)


def test_unknown_type_leaves_the_rest_readable(tmp_path: Path) -> None:
    rows = (tensor_row("a", (4,), 0, 0), tensor_row("b", (4,), 77, 32))
    info = parse(tmp_path, raw_gguf(rows=rows, data=bytes(64))).tensors
    assert (info["a"].format, info["b"].format, info["b"].nbytes, info["b"].ggml_type) == ("f32", None, None, 77)


class TestCost:
    def test_300_gb_of_sparse_file_open_in_a_second(self, tmp_path: Path) -> None:
        experts = 1 << 20  # [2^20, 256, 1024] of q2_k: 88 GB in one tensor
        words = struct.pack("<IQ", STRING, 150_000) + b"".join(text(f"token{i}") for i in range(150_000))
        rows = tuple(tensor_row(f"blk.{i}.w", (1024, 256, experts), 10, i * experts * 256 * 4 * 84) for i in range(3))
        data = raw_gguf((entry("tokens", ARRAY, words),), rows)
        start = time.perf_counter()
        header = parse(tmp_path, data, size=300 * 10**9)
        assert time.perf_counter() - start < 1.0
        assert header.tensors["blk.2.w"].offset > 170 * 10**9

    @pytest.mark.parametrize("kind", [U8, U64, STRING, ARRAY], ids=["u8", "u64", "string", "array"])
    def test_claimed_counts_in_a_huge_file_allocate_nothing(self, tmp_path: Path, kind: int) -> None:
        data = raw_gguf((entry("k", ARRAY, struct.pack("<IQ", kind, MAX_ELEMENTS + 1)),))
        tracemalloc.start()
        error = refused(tmp_path, data, size=10**12)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert error.reason == "count"
        assert peak < 2 << 20

    def test_arrays_share_one_allowance(self, tmp_path: Path) -> None:
        half = struct.pack("<IQ", U8, MAX_ELEMENTS // 2 + 1) + bytes(MAX_ELEMENTS // 2 + 1)
        assert refused(tmp_path, raw_gguf((entry("a", ARRAY, half), entry("b", ARRAY, half)))).reason == "count"

    def test_a_header_without_end_is_refused(self, tmp_path: Path) -> None:
        piece = text(bytes(15 << 20))
        count = MAX_HEADER_BYTES // len(piece) + 1
        data = raw_gguf((entry("k", ARRAY, struct.pack("<IQ", STRING, count) + piece * count),))
        assert refused(tmp_path, data).reason == "count"


def header_or_error(path: Path) -> GgufHeader | CheckpointError:
    """What comes of a file that may be damaged; any other exception fails the test."""
    file = RawFile(path)
    try:
        return read_header(file)
    except CheckpointError as error:
        return error
    finally:
        file.close()


@pytest.mark.parametrize("seed", range(2))  # the fuzz test of the fault suite covers single damages
def test_random_damage_is_refused_or_harmless(tmp_path: Path, seed: int) -> None:
    """Bytes of a good header changed, or the file cut: an error, or a header whose tensors lie in the file."""
    entries = (
        entry("general.architecture", STRING, text("lab")),
        entry("general.alignment", U32, struct.pack("<I", 32)),
        entry("list", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("bc")),
        entry("deep", ARRAY, nested(3)),
    )
    rows = (
        tensor_row("a.weight", (256, 2), 10, 0),
        tensor_row("b.weight", (8,), 0, 192),
        tensor_row("c", (2, 2), 30, 224),
    )
    good = raw_gguf(entries, rows, bytes(232))
    rng = np.random.default_rng(seed)
    path = tmp_path / "damaged.gguf"
    seen = {GgufHeader: 0, CheckpointError: 0}
    for _ in range(400):
        bad = bytearray(good)
        for at in rng.integers(0, len(good), rng.integers(1, 4)):
            bad[at] = rng.integers(0, 256)
        path.write_bytes(bad[: rng.integers(0, len(bad)) if rng.random() < 0.2 else len(bad)])
        came = header_or_error(path)
        seen[type(came)] += 1
        if isinstance(came, GgufHeader):
            assert all(t.offset + (t.nbytes or 1) <= path.stat().st_size for t in came.tensors.values())
        else:
            assert str(path) in str(came)
            assert len(str(came)) < 2000
    assert min(seen.values()) > 20
