"""The experts of one model: what a cache asks for, and where it is read.

Every slot of a cache is as wide as the widest layer's expert. Several files are one space of offsets, one after the
other, in the order in which experts first name them. Knows nothing about threads, devices or policies.
"""

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from moe_lab._types import Tensor
from moe_lab.checkpoint.expert_slice import ExpertSlice
from moe_lab.checkpoint.names import EXPERT
from moe_lab.checkpoint.rawfile import FileIdentity, RawFile, ReadCall
from moe_lab.errors import CheckpointError, LabError
from moe_lab.formats import WeightFormat
from moe_lab.formats.layouts import RAW, check_layout
from moe_lab.stream.access import IoMode, open_files
from moe_lab.stream.geometry import LayerGeometry, Part, Segment, aligned, lay_out
from moe_lab.stream.joined import Readable, starts_of
from moe_lab.stream.packing import Packing, kept_parts

# (tensor name, format, offset of expert 0 in the file, bytes per expert, (E, N, Kd)): experts one after another
PlainSlice = tuple[str, str | WeightFormat, int, int, Sequence[int]]


@runtime_checkable
class _SlicedCheckpoint(Protocol):
    """The part of a Checkpoint that a source is made from."""

    @property
    def path(self) -> Path: ...
    @property
    def moe_layers(self) -> Sequence[int]: ...
    def expert_slices(self, layer: int) -> Sequence[ExpertSlice]: ...


class ExpertSource:
    """Experts of one model. `slices_by_layer`: {layer: gate, up and down}, each an ExpertSlice, or plainly (tensor,
    format, offset, bytes per expert, (E, N, Kd)) where the experts of a tensor follow each other in the file `path`.

    The files' identities are taken now, or given when the caller read their headers earlier; `open` refuses a file that
    has changed since. `read_call` stands in for `os.preadv` (fault tests). LabError for a geometry that cannot be,
    CheckpointError for one past a file's end.

    `slot_bytes` is what a cache's slot takes, in `layout`; `stage_bytes` what an expert takes on its way there, raw.
    """

    layout: str = RAW
    slot_bytes: int
    _kept: "Mapping[int, tuple[Part, ...]] | None" = None
    _raw_slot_bytes: int | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        slices_by_layer: Mapping[int, Sequence[PlainSlice | ExpertSlice]],
        model_hash: str | None = None,
        *,
        identities: Mapping[Path, FileIdentity] | None = None,
        read_call: ReadCall | None = None,
    ) -> None:
        if not slices_by_layer:
            raise LabError(f"{path}: an expert source wants at least one MoE layer, got none.")
        self.path = Path(path)
        self.model_hash = model_hash
        self._read_call = read_call
        slices = {
            layer: [_with_places(s, self.path, layer) for s in slices_by_layer[layer]]
            for layer in sorted(slices_by_layer)
        }
        files = dict.fromkeys(
            file
            for parts in slices.values()
            for part in parts
            for run in (part, *part.beside)
            for file, _ in run.places
        )
        known = identities or {}
        self._identities = {file: known.get(file) or _identity(file) for file in files}
        starts = starts_of([identity.size for identity in self._identities.values()])
        self._layers: dict[int, LayerGeometry] = {}
        begins = dict(zip(self._identities, starts, strict=True))
        for layer, parts in slices.items():
            self._layers[layer] = lay_out(layer, parts, begins)
            self._check_inside(layer, parts)
        self.slot_bytes = aligned(max(geometry.span_bytes for geometry in self._layers.values()))

    @classmethod
    def from_checkpoint(cls, ckpt: _SlicedCheckpoint, **more) -> "ExpertSource":
        """All MoE layers of an open checkpoint."""
        return cls(ckpt.path, {layer: ckpt.expert_slices(layer) for layer in ckpt.moe_layers}, **more)

    def __repr__(self) -> str:
        return f"ExpertSource({str(self.path)!r}, {len(self._layers)} layers, slot {self.slot_bytes} bytes)"

    def same_as(self, other: "ExpertSource") -> bool:
        """Whether both name the same bytes: same file, same state of it, same geometry, same layout of slots."""
        if self is other:
            return True
        return (self._identities, self._layers, self.layout) == (other._identities, other._layers, other.layout)

    def kept_as(self, layout: str) -> "ExpertSource":
        """The same experts, kept by slots in a layout of `formats.layouts`: itself where they are. LabError naming the
        first part that has no such layout."""
        check_layout(layout)
        if layout == self.layout:
            return self
        other = copy.copy(self)
        other.layout, other._raw_slot_bytes = layout, self.stage_bytes
        if layout == RAW:
            other._kept, other.slot_bytes = None, self.stage_bytes
            return other
        kept = {layer: kept_parts(layer, g.parts, layout) for layer, g in self._layers.items()}
        other._kept = kept
        other.slot_bytes = aligned(max(parts[-1].slot_offset + parts[-1].nbytes for parts in kept.values()))
        return other

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
        """gate, up, down of one layer, raw, with their place in what is read (and in a slot that keeps them so)."""
        return self._layer(layer).parts

    def slot_parts(self, layer: int) -> tuple[Part, ...]:
        """The same as slots keep them."""
        raw = self._layer(layer).parts
        return raw if self._kept is None else self._kept[layer]

    def packing(self, layer: int) -> Packing | None:
        """What brings an expert's raw bytes into a slot; None where slots keep them raw."""
        return None if self._kept is None else Packing(self._layer(layer).parts, self._kept[layer])

    @property
    def stage_bytes(self) -> int:
        """Bytes of a buffer that holds any expert as it is read."""
        return self.slot_bytes if self._raw_slot_bytes is None else self._raw_slot_bytes

    def geometry(self, layer: int) -> LayerGeometry:
        """How the layer's experts lie in the files and in a slot."""
        return self._layer(layer)

    def expert_nbytes(self, layer: int) -> int:
        """Bytes read from the file for one expert of `layer`."""
        return self._layer(layer).nbytes

    def span_bytes(self, layer: int) -> int:
        """Bytes of a slot that `layer` fills, gaps between the parts included."""
        return self._layer(layer).span_bytes

    def segments(self, layer: int, expert: int) -> list[Segment]:
        """The reads that bring one expert in."""
        self.check_experts(layer, (expert,))
        return [run.segment(expert) for run in self._layer(layer).runs]

    def open(self, io: IoMode = "auto") -> Readable:
        """Descriptors of its own on the files, read as `io` says (see `access`). CheckpointError "changed" when one is
        not the file of the header.
        """
        usual = max(segment.nbytes for layer in self._layers for segment in self.segments(layer, 0))
        return open_files(self._identities, io, self._read_call, usual_bytes=usual)

    @property
    def files(self) -> int:
        """Descriptors that one `open` takes."""
        return len(self._identities)

    def checksum(self, layer: int, expert: int) -> int | None:
        """CRC-32 of the expert's bytes as they lie in a slot, gaps included; None where the files have none."""
        return None

    def host_row(self, layer: int, expert: int) -> Tensor | None:
        """The expert in host memory as it lies in a slot, uint8 [span], from which a GPU may copy it; None: read it."""
        return None

    def reading_through(self, call: ReadCall) -> "ExpertSource":
        """The same experts, read with `call` in the place of `os.preadv`: disks with faults, counted reads."""
        other = copy.copy(self)
        other._read_call = call
        return other

    def _layer(self, layer: int) -> LayerGeometry:
        if layer not in self._layers:
            raise LabError(f"{self.path} has no MoE layer {layer}; it has {', '.join(map(str, self._layers))}.")
        return self._layers[layer]

    def _check_inside(self, layer: int, slices: Sequence[ExpertSlice]) -> None:
        for given in slices:
            for run, nbytes in ((given, given.expert_nbytes), *((side, side.nbytes) for side in given.beside)):
                for expert, (file, offset) in enumerate(run.places):
                    end, size = offset + nbytes, self._identities[file].size
                    if end > size:
                        raise CheckpointError(
                            file, "truncated",
                            f"layer {layer} expert {expert} ends at byte {end}, the file at byte {size}.",
                            tensor=run.name.replace(EXPERT, str(expert)), seen=size, wanted=end,
                        )  # fmt: skip


def _with_places(given: PlainSlice | ExpertSlice, path: Path, layer: int) -> ExpertSlice:
    if isinstance(given, ExpertSlice):
        return given
    tensor, fmt, offset, nbytes, shape = given
    experts, rows, columns = (int(n) for n in shape)
    if min(experts, rows, columns) < 1 or offset < 0:
        raise LabError(
            f"layer {layer}, tensor {tensor!r}: E={experts}, N={rows}, Kd={columns} at byte {offset}; "
            "wanted sizes above 0."
        )
    places = tuple((path, int(offset) + e * int(nbytes)) for e in range(experts))
    return ExpertSlice(tensor, fmt, int(nbytes), (experts, rows, columns), places)


def _identity(path: Path) -> FileIdentity:
    file = RawFile(path)
    file.close()
    return file.identity
