"""Where experts stand in a file and in a slot."""

from pathlib import Path

import pytest

from moe_lab.checkpoint.expert_slice import ExpertSlice
from moe_lab.errors import CheckpointError, LabError
from moe_lab.stream.source import ExpertSource
from tests.support.expert_files import expert_bytes, write_experts


def three(offset: int = 0, nbytes: int = 24, shape: tuple[int, int, int] = (4, 2, 3), fmt: str = "f32") -> list[tuple]:
    """Plain slices of gate, up, down, one stack after another."""
    size = nbytes * shape[0]
    return [(name, fmt, offset + i * size, nbytes, shape) for i, name in enumerate(("g", "u", "d"))]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "experts.bin"
    path.write_bytes(bytes(1000))
    return path


def test_parts_start_at_multiples_of_256_inside_a_slot(tmp_path: Path):
    source = write_experts(tmp_path / "x.bin", layers=[0], shapes=lambda _: ((3, 5), (100, 3), (5, 7)))
    gate, up, down = source.parts(0)
    assert [(p.name, p.format, p.shape, p.slot_offset, p.nbytes, p.row_bytes) for p in (gate, up, down)] == [
        ("gate", "f32", (3, 5), 0, 60, 20),
        ("up", "f32", (100, 3), 256, 1200, 12),
        ("down", "f32", (5, 7), 1536, 140, 28),
    ]
    assert source.span_bytes(0) == 1676
    assert source.slot_bytes == 1792
    assert source.expert_nbytes(0) == 60 + 1200 + 140


def test_a_slot_is_as_wide_as_the_widest_layer(tmp_path: Path):
    source = write_experts(
        tmp_path / "x.bin", layers=[2, 7], shapes=lambda n: ((3, 5),) * 3 if n == 2 else ((90, 50),) * 3
    )
    assert source.layers == (2, 7)
    assert source.slot_bytes >= source.span_bytes(7) > source.span_bytes(2)


def test_segments_point_at_the_bytes_of_the_expert(tmp_path: Path):
    source = write_experts(tmp_path / "x.bin", layers=[0, 3], experts=5)
    data = (tmp_path / "x.bin").read_bytes()
    for layer in (0, 3):
        for expert in range(5):
            for part, segment in zip(source.parts(layer), source.segments(layer, expert), strict=True):
                found = data[segment.file_offset : segment.file_offset + segment.nbytes]
                assert found == expert_bytes(layer, expert, part.name, part.nbytes)
                assert segment.slot_offset == part.slot_offset


@pytest.mark.parametrize("expert", [-1, 8, 10**9])
def test_an_expert_outside_the_layer_is_refused(tmp_path: Path, expert: int):
    source = write_experts(tmp_path / "x.bin")
    with pytest.raises(LabError, match=rf"layer 1 has no expert {expert}: wanted 0\.\.7"):
        source.segments(1, expert)


def test_an_unknown_layer_is_refused_listing_those_there_are(tmp_path: Path):
    source = write_experts(tmp_path / "x.bin", layers=[1, 4])
    with pytest.raises(LabError, match="no MoE layer 2; it has 1, 4"):
        source.parts(2)


@pytest.mark.parametrize(
    ("slices", "told"),
    [
        ({}, "at least one MoE layer"),
        ({0: three()[:2]}, "got 2 slices"),
        ({0: three(nbytes=20)}, "20 bytes per expert, but 2 rows of 3 values in f32 take 24"),
        ({0: [*three()[:2], ("d", "f32", 0, 24, (5, 2, 3))]}, r"\[4, 5\] experts"),
        ({0: three(shape=(0, 2, 3))}, "E=0"),
        ({0: three(offset=-1)}, "at byte -1"),
        ({0: three(fmt="q9_z")}, "q9_z"),
        ({0: three(fmt="q2_k")}, "256"),
    ],
    ids=["no-layer", "two-parts", "row-bytes", "uneven-E", "no-expert", "negative-offset", "format", "short-row"],
)
def test_an_impossible_geometry_is_refused_with_its_numbers(file: Path, slices: dict, told: str):
    with pytest.raises(LabError, match=told):
        ExpertSource(file, slices)


def test_experts_past_the_end_of_the_file_are_refused_at_once(file: Path):
    ExpertSource(file, {0: three(offset=1000 - 3 * 4 * 24)})
    with pytest.raises(CheckpointError, match="layer 0 expert 3 ends at byte 1001, the file at byte 1000") as info:
        ExpertSource(file, {0: three(offset=1001 - 3 * 4 * 24)})
    assert (info.value.reason, info.value.tensor, info.value.wanted) == ("truncated", "d", 1001)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"nowhere\.bin"):
        ExpertSource(tmp_path / "nowhere.bin", {0: three()})


def test_a_file_changed_since_its_header_was_read_is_refused_on_opening(file: Path):
    source = ExpertSource(file, {0: three()})
    file.write_bytes(bytes(2000))
    with pytest.raises(CheckpointError, match="changed since its header was read") as info:
        source.open()
    assert info.value.reason == "changed"


def test_same_as_compares_file_state_and_geometry(tmp_path: Path):
    path = tmp_path / "x.bin"
    source = write_experts(path)
    twin = write_experts(path)  # written again: same bytes, another state of the file
    assert source.same_as(source)
    assert not source.same_as(twin)
    slices = {0: three(offset=37)}
    assert ExpertSource(path, slices).same_as(ExpertSource(path, slices))
    assert not ExpertSource(path, slices).same_as(ExpertSource(path, {0: three(offset=38)}))


def two_files(folder: Path) -> ExpertSource:
    """Experts 0 and 2 in one file, 1 and 3 in another, gate, up and down of an expert one after another."""
    size, shape = 24, (4, 2, 3)
    files = [folder / "a.bin", folder / "b.bin"]
    for number, file in enumerate(files):
        file.write_bytes(bytes(7) + b"".join(bytes([number * 100 + i]) * size for i in range(6)))
    parts = [
        ExpertSlice(f"x.{{expert}}.{name}", "f32", size, shape,
                    tuple((files[e % 2], 7 + (e // 2 * 3 + i) * size) for e in range(4)))
        for i, name in enumerate(("g", "u", "d"))
    ]  # fmt: skip
    return ExpertSource(folder, {0: parts})


def test_experts_of_several_files_are_read_from_theirs(tmp_path: Path):
    source = two_files(tmp_path)
    files = source.open()
    for expert in range(4):
        for i, segment in enumerate(source.segments(0, expert)):
            into = bytearray(segment.nbytes)
            files.read_into(segment.file_offset, memoryview(into), tensor=segment.tensor)
            assert set(into) == {expert % 2 * 100 + expert // 2 * 3 + i}
            assert segment.tensor == f"x.{expert}.{'gud'[i]}"
    files.close()
    assert source.same_as(two_files(tmp_path)) is False  # written anew: other files by their times


def test_an_expert_past_the_end_of_its_own_file_is_refused(tmp_path: Path):
    """The second file's end counts, not the two together."""
    two_files(tmp_path)
    short = tmp_path / "a.bin"
    part = ExpertSlice(
        "x.{expert}", "f32", 24, (2, 2, 3), ((tmp_path / "b.bin", 0), (short, short.stat().st_size - 23))
    )
    with pytest.raises(CheckpointError, match=r"layer 0 expert 1 ends") as caught:
        ExpertSource(tmp_path, {0: [part] * 3})
    assert (caught.value.reason, caught.value.tensor, Path(str(caught.value.file))) == ("truncated", "x.1", short)
