"""Experts of another source held in host memory: the tier between a disk and a GPU, and a source without a disk.

Each expert is a row of its own, laid out as in a slot, so that one copy brings it in. Page-locked, a GPU copies from
the rows themselves: nothing is read and nothing is staged.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from moe_lab._types import Tensor, UInt8
from moe_lab.checkpoint.rawfile import MAX_READ_BYTES, ReadCall
from moe_lab.errors import LabError
from moe_lab.stream.access import IoMode
from moe_lab.stream.geometry import LayerGeometry, Segment
from moe_lab.stream.joined import Readable
from moe_lab.stream.memory import LockedBlock, available_host_bytes, copy_bytes, host_block, whole_pages
from moe_lab.stream.source import ExpertSource


class MemorySource(ExpertSource):
    """All experts of `source` (or of some `layers`), copied when this is made. `locked`: page-locked, for a GPU.

    Takes `memory_bytes` of host memory, a whole number of pages an expert. LabError where that cannot be had.
    """

    def __init__(
        self, source: ExpertSource, layers: Iterable[int] | None = None, *, locked: bool = False, cuda: Any = torch.cuda
    ) -> None:
        chosen = source.layers if layers is None else tuple(sorted(set(layers)))
        self.path, self.model_hash = source.path, source.model_hash
        self._read_call, self._identities = None, {}
        spans = {layer: whole_pages(source.span_bytes(layer)) for layer in chosen}
        self.memory_bytes = sum(spans[layer] * source.num_experts(layer) for layer in chosen)
        self._block = self._take(locked, cuda)
        self._bytes = (self._block.tensor if isinstance(self._block, LockedBlock) else self._block).numpy().data
        self._layers: dict[int, LayerGeometry] = {}
        self._rows: dict[tuple[int, int], Tensor] = {}  # page-locked ones: making a view costs as much as a copy call
        at = 0
        for layer in chosen:
            geometry, count = source.geometry(layer), source.num_experts(layer)
            rows = tuple(at + expert * spans[layer] for expert in range(count))
            runs = tuple(replace(r, starts=tuple(row + r.part.slot_offset for row in rows)) for r in geometry.runs)
            self._layers[layer] = replace(geometry, runs=runs)
            at += count * spans[layer]
        self.slot_bytes = max(spans.values())
        self._rows: dict[tuple[int, int], Tensor] = {}
        self._fill(source)

    @property
    def files(self) -> int:
        """None."""
        return 0

    @property
    def locked_bytes(self) -> int:
        """Page-locked bytes."""
        return self._block.locked_bytes if isinstance(self._block, LockedBlock) else 0

    def same_as(self, other: ExpertSource) -> bool:
        """Only itself: the bytes may be anybody's."""
        return self is other

    def segments(self, layer: int, expert: int) -> list[Segment]:
        """One copy of the whole row."""
        self.check_experts(layer, (expert,))
        return [Segment(self._row(layer, expert), self.span_bytes(layer), 0, f"layer {layer} expert {expert}")]

    def open(self, io: IoMode = "auto") -> Readable:
        """A reader of the rows; `io` has nothing to say here."""
        return MemoryFile(self._bytes)

    def host_row(self, layer: int, expert: int) -> UInt8[Tensor, " span"] | None:
        """The row itself where it is page-locked."""
        row = self._rows.get((layer, expert))  # a view costs 8 us, a thirtieth of what its copy to a GPU takes
        if row is None and self.locked_bytes:
            assert isinstance(self._block, LockedBlock)
            start = self._row(layer, expert)
            row = self._rows[layer, expert] = self._block.tensor[start : start + self.span_bytes(layer)]
        return row

    def reading_through(self, call: ReadCall) -> ExpertSource:
        """LabError: no call of the system's reads these bytes."""
        raise LabError("experts in memory are not read by a system call: give the fault to the source behind them.")

    def __repr__(self) -> str:
        return f"MemorySource({str(self.path)!r}, {len(self._layers)} layers, {self.memory_bytes} bytes)"

    def _row(self, layer: int, expert: int) -> int:
        return self._layer(layer).runs[0].starts[expert]

    def _take(self, locked: bool, cuda: Any) -> "LockedBlock | Tensor":
        free = available_host_bytes()
        if free is not None and self.memory_bytes > free:
            raise LabError(
                f"{self.path}: its experts take {self.memory_bytes:,} bytes of host memory, {free:,} are free. "
                "Name fewer layers."
            )
        try:
            return LockedBlock(self.memory_bytes, cuda) if locked else host_block(self.memory_bytes)
        except (MemoryError, OSError) as error:
            raise LabError(
                f"{self.path}: no memory for its experts' {self.memory_bytes:,} bytes. Name fewer layers."
            ) from error

    def _fill(self, source: ExpertSource) -> None:
        file = source.open()
        try:
            for layer in self.layers:
                for expert in range(self.num_experts(layer)):
                    start = self._row(layer, expert)
                    for segment in source.segments(layer, expert):
                        at = start + segment.slot_offset
                        into = self._bytes[at : at + segment.nbytes]
                        file.read_into(segment.file_offset, into, tensor=segment.tensor)
        finally:
            file.close()


class MemoryFile:
    """A Readable over bytes in memory."""

    io_mode = "memory"

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def read_into(
        self, offset: int, view: memoryview, *, tensor: str | None = None, request_bytes: int = MAX_READ_BYTES
    ) -> None:
        """Copy `view.nbytes` bytes from `offset`."""
        copy_bytes(view, self._data[offset : offset + view.nbytes])

    def close(self) -> None:
        """Nothing to give back."""
