"""Where each expert's bytes stand in a file, and where its parts go inside a cache slot.

An expert is three parts, gate, up and down. In a slot they start at multiples of 256 bytes (so that a kernel's widest
load is aligned wherever the slot stands); every slot is as wide as the widest layer's expert. Knows nothing about
threads, devices or policies.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from moe_lab.checkpoint.rawfile import FileIdentity, RawFile, ReadCall
from moe_lab.errors import CheckpointError, LabError
from moe_lab.formats import WeightFormat, get_format

PART_NAMES = ("gate", "up", "down")
ALIGN_BYTES = 256

# (tensor name, format, offset of expert 0 in the file, bytes per expert, (E, N, Kd))
PlainSlice = tuple[str, str | WeightFormat, int, int, Sequence[int]]


@runtime_checkable
class _SlicedCheckpoint(Protocol):
    """The part of a Checkpoint that a source is made from."""

    @property
    def path(self) -> Path: ...
    @property
    def moe_layers(self) -> Sequence[int]: ...
    def expert_slices(self, layer: int) -> Sequence: ...


@dataclass(frozen=True, slots=True)
class Part:
    """One projection inside a slot: `name` gate, up or down; `shape` (N, Kd) in values; `nbytes` from `slot_offset`."""

    name: str
    codec: WeightFormat
    shape: tuple[int, int]
    slot_offset: int
    nbytes: int

    @property
    def format(self) -> str:
        """The format's name."""
        return self.codec.name

    @property
    def row_bytes(self) -> int:
        """Bytes of one of the N rows."""
        return self.nbytes // self.shape[0]


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous read: `nbytes` at `file_offset` into `slot_offset`. `tensor` names it in errors."""

    file_offset: int
    nbytes: int
    slot_offset: int
    tensor: str


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's geometry: E experts, their parts, and each part's (tensor, offset of expert 0)."""

    num_experts: int
    parts: tuple[Part, ...]
    origins: tuple[tuple[str, int], ...]

    @property
    def span_bytes(self) -> int:
        return self.parts[-1].slot_offset + self.parts[-1].nbytes


class ExpertSource:
    """Experts of one file. `slices_by_layer`: {layer: three of (tensor, format, offset, bytes per expert, (E, N, Kd))}.

    Experts of a tensor follow each other (expert e at offset + e * bytes). The file's identity is taken now, or given
    when the caller read its header earlier; `open` refuses a file that has changed since. `read_call` stands in for
    `os.preadv` (fault tests). LabError for a geometry that cannot be, CheckpointError for one past the file's end.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        slices_by_layer: Mapping[int, Sequence[PlainSlice]],
        model_hash: str | None = None,
        *,
        identity: FileIdentity | None = None,
        read_call: ReadCall | None = None,
    ) -> None:
        if not slices_by_layer:
            raise LabError(f"{path}: an expert source wants at least one MoE layer, got none.")
        self.path = Path(path)
        self.model_hash = model_hash
        self.identity = identity or _identity(self.path)
        self._read_call = read_call
        self._layers = {layer: _layout(layer, slices_by_layer[layer]) for layer in sorted(slices_by_layer)}
        self._check_inside()
        self.slot_bytes = _aligned(max(geometry.span_bytes for geometry in self._layers.values()))

    @classmethod
    def from_checkpoint(cls, ckpt: _SlicedCheckpoint, **more) -> "ExpertSource":
        """All MoE layers of an open checkpoint."""
        slices = {
            layer: [(s.name, s.format, s.offset, s.expert_nbytes, tuple(s.shape)) for s in ckpt.expert_slices(layer)]
            for layer in ckpt.moe_layers
        }
        return cls(ckpt.path, slices, **more)

    def __repr__(self) -> str:
        return f"ExpertSource({str(self.path)!r}, {len(self._layers)} layers, slot {self.slot_bytes} bytes)"

    def same_as(self, other: "ExpertSource") -> bool:
        """Whether both name the same bytes: same file, same state of it, same geometry."""
        return self is other or (self.identity == other.identity and self._layers == other._layers)

    @property
    def layers(self) -> tuple[int, ...]:
        """MoE layer numbers, ascending."""
        return tuple(self._layers)

    @property
    def total_experts(self) -> int:
        """(layer, expert) pairs in the file."""
        return sum(geometry.num_experts for geometry in self._layers.values())

    def num_experts(self, layer: int) -> int:
        """E of one layer."""
        return self._layer(layer).num_experts

    def check_experts(self, layer: int, experts: Iterable[int]) -> None:
        """LabError when the file has no such layer, or the layer no such expert."""
        count = self._layer(layer).num_experts
        for expert in experts:
            if not 0 <= expert < count:
                raise LabError(f"layer {layer} has no expert {expert}: wanted 0..{count - 1}.")

    def parts(self, layer: int) -> tuple[Part, ...]:
        """gate, up, down of one layer with their place in a slot."""
        return self._layer(layer).parts

    def expert_nbytes(self, layer: int) -> int:
        """Bytes read from the file for one expert of `layer`."""
        return sum(part.nbytes for part in self._layer(layer).parts)

    def span_bytes(self, layer: int) -> int:
        """Bytes of a slot that `layer` fills, gaps between the parts included."""
        return self._layer(layer).span_bytes

    def segments(self, layer: int, expert: int) -> list[Segment]:
        """The reads that bring one expert in."""
        geometry = self._layer(layer)
        self.check_experts(layer, (expert,))
        return [
            Segment(origin + expert * part.nbytes, part.nbytes, part.slot_offset, tensor)
            for part, (tensor, origin) in zip(geometry.parts, geometry.origins, strict=True)
        ]

    def open(self) -> RawFile:
        """A descriptor of its own on the file. CheckpointError "changed" when it is not the file of the header."""
        file = RawFile(self.path) if self._read_call is None else RawFile(self.path, self._read_call)
        if file.identity != self.identity:
            file.close()
            raise CheckpointError(
                self.path, "changed", "the file changed since its header was read. Open the model again.",
                seen=file.identity, wanted=self.identity,
            )  # fmt: skip
        return file

    def _layer(self, layer: int) -> _Layer:
        if layer not in self._layers:
            raise LabError(f"{self.path} has no MoE layer {layer}; it has {', '.join(map(str, self._layers))}.")
        return self._layers[layer]

    def _check_inside(self) -> None:
        for layer, geometry in self._layers.items():
            for segment in self.segments(layer, geometry.num_experts - 1):
                end = segment.file_offset + segment.nbytes
                if end > self.identity.size:
                    raise CheckpointError(
                        self.path, "truncated",
                        f"layer {layer} expert {geometry.num_experts - 1} ends at byte {end}, "
                        f"the file at byte {self.identity.size}.",
                        tensor=segment.tensor, seen=self.identity.size, wanted=end,
                    )  # fmt: skip


def _layout(layer: int, slices: Sequence[PlainSlice]) -> _Layer:
    """Place the three parts one after another, each at a multiple of ALIGN_BYTES."""
    if len(slices) != len(PART_NAMES):
        raise LabError(f"layer {layer}: an expert has the parts {', '.join(PART_NAMES)}, got {len(slices)} slices.")
    counts = {int(shape[0]) for _, _, _, _, shape in slices}
    if len(counts) != 1:
        raise LabError(f"layer {layer}: gate, up and down hold {sorted(counts)} experts; wanted one E for all three.")
    parts: list[Part] = []
    place = 0
    for name, (tensor, fmt, offset, nbytes, (experts, rows, columns)) in zip(PART_NAMES, slices, strict=True):
        codec = get_format(fmt)
        if min(experts, rows, columns) < 1 or offset < 0:
            raise LabError(
                f"layer {layer}, tensor {tensor!r}: E={experts}, N={rows}, Kd={columns} at byte {offset}; "
                "wanted sizes above 0."
            )
        if nbytes != rows * codec.row_bytes(columns):
            raise LabError(
                f"layer {layer}, tensor {tensor!r}: {nbytes} bytes per expert, but {rows} rows of {columns} values in "
                f"{codec.name} take {rows * codec.row_bytes(columns)}."
            )
        parts.append(Part(name, codec, (int(rows), int(columns)), place, int(nbytes)))
        place = _aligned(place + int(nbytes))
    return _Layer(counts.pop(), tuple(parts), tuple((str(s[0]), int(s[2])) for s in slices))


def _identity(path: Path) -> FileIdentity:
    file = RawFile(path)
    file.close()
    return file.identity


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
