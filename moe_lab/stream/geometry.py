"""How the experts of a layer lie in files and in a cache slot.

An expert is three parts, gate, up and down, and in formats with scales of their own what stands beside their codes. In
a slot every run starts at a multiple of 256 bytes, so that a kernel's widest load is aligned wherever the slot stands.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from moe_lab.checkpoint.expert_slice import ExpertSlice
from moe_lab.checkpoint.names import EXPERT
from moe_lab.errors import LabError
from moe_lab.formats import WeightFormat, get_format
from moe_lab.formats.layouts import RAW, REPACKED

PART_NAMES = ("gate", "up", "down")
ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class Part:
    """One projection inside a slot: `name` gate, up or down; `shape` (N, Kd) in values; `nbytes` from `slot_offset`.

    Formats with scales of their own have parts `beside` the codes: `field` of QuantTensor, `shape` in values of
    `dtype`. `layout`: of its bytes (`formats.layouts`).
    """

    name: str
    codec: WeightFormat
    shape: tuple[int, int]
    slot_offset: int
    nbytes: int
    field: str = "data"
    dtype: torch.dtype = torch.uint8
    beside: "tuple[Part, ...]" = ()
    layout: str = RAW

    @property
    def format(self) -> str:
        """The format's name."""
        return self.codec.name

    @property
    def row_bytes(self) -> int:
        """Bytes of one of the N rows."""
        return self.nbytes // self.shape[0]

    @property
    def room(self) -> tuple[int, ...]:
        """Shape of the part's bytes: [N, row_bytes], or what its layout makes of them."""
        if self.layout == RAW:
            return self.shape[0], self.row_bytes
        return REPACKED[self.layout].room(self.format, *self.shape)

    @property
    def all(self) -> "tuple[Part, ...]":
        """The codes and what stands beside them."""
        return (self, *self.beside)


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous read: `nbytes` at `file_offset` of the source's files taken together, into `slot_offset`. `tensor`
    names it in errors.
    """

    file_offset: int
    nbytes: int
    slot_offset: int
    tensor: str


@dataclass(frozen=True, slots=True)
class Run:
    """Where a part's experts begin in the files taken together, and the tensors' names."""

    part: Part
    name: str
    starts: tuple[int, ...]

    def segment(self, expert: int) -> Segment:
        """The read that brings this expert's part in."""
        name = self.name.replace(EXPERT, str(expert))
        return Segment(self.starts[expert], self.part.nbytes, self.part.slot_offset, name)


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer's geometry: E experts, their parts, and the runs that fill them."""

    num_experts: int
    parts: tuple[Part, ...]
    runs: tuple[Run, ...]
    nbytes: int = field(init=False, compare=False)  # read from the files for one expert; asked for at each read

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", sum(run.part.nbytes for run in self.runs))

    @property
    def span_bytes(self) -> int:
        """Bytes of a slot that the layer fills, gaps included."""
        last = self.runs[-1].part
        return last.slot_offset + last.nbytes


def lay_out(layer: int, slices: Sequence[ExpertSlice], begins: Mapping[Path, int]) -> LayerGeometry:
    """Place the three parts one after another, each at a multiple of ALIGN_BYTES."""
    if len(slices) != len(PART_NAMES):
        raise LabError(f"layer {layer}: an expert has the parts {', '.join(PART_NAMES)}, got {len(slices)} slices.")
    counts = {part.shape[0] for part in slices}
    if len(counts) != 1:
        raise LabError(f"layer {layer}: gate, up and down hold {sorted(counts)} experts; wanted one E for all three.")
    parts: list[Part] = []
    runs: list[Run] = []
    for name, given in zip(PART_NAMES, slices, strict=True):
        codec = get_format(given.format)
        _, rows, columns = given.shape
        if given.expert_nbytes != rows * codec.row_bytes(columns):
            raise LabError(
                f"layer {layer}, tensor {given.name!r}: {given.expert_nbytes} bytes per expert, but {rows} rows of "
                f"{columns} values in {codec.name} take {rows * codec.row_bytes(columns)}."
            )
        first = Part(name, codec, (rows, columns), _end(runs), given.expert_nbytes)
        mine = [Run(first, given.name, _from(begins, given.places))]
        for side in given.beside:
            place = Part(f"{name}.{side.field}", codec, side.shape, _end(mine), side.nbytes, side.field, side.dtype)
            mine.append(Run(place, side.name, _from(begins, side.places)))
        parts.append(replace(first, beside=tuple(run.part for run in mine[1:])))
        runs += mine
    return LayerGeometry(counts.pop(), tuple(parts), tuple(runs))


def _end(runs: Sequence[Run]) -> int:
    """Where the next part may begin in a slot."""
    return aligned(runs[-1].part.slot_offset + runs[-1].part.nbytes) if runs else 0


def _from(begins: Mapping[Path, int], places: Iterable[tuple[Path, int]]) -> tuple[int, ...]:
    return tuple(begins[file] + offset for file, offset in places)


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
