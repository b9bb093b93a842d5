"""Experts that slots keep in another layout than files: where their parts lie in a slot, and how they get there.

Files have raw blocks. A layout (`formats.layouts`) repacks each matrix by itself, so a slot stays a slot: one expert,
its parts one after another, each at a multiple of ALIGN_BYTES.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moe_lab._types import Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab.formats.layouts import REPACKED, refusal
from moe_lab.stream.geometry import Part, aligned


def kept_parts(layer: int, parts: Sequence[Part], layout: str) -> tuple[Part, ...]:
    """The raw parts of a layer's experts as slots keep them. LabError naming layer and part for a format, or a shape,
    that the layout has not."""
    kept: list[Part] = []
    for part in parts:
        why = refusal(layout, part.format, *part.shape)
        if why is not None:
            raise LabError(f"layer {layer}: {part.name} cannot be kept in layout {layout!r}: {why}.")
        start = aligned(kept[-1].slot_offset + kept[-1].nbytes) if kept else 0
        nbytes = torch.Size(REPACKED[layout].room(part.format, *part.shape)).numel()
        kept.append(replace(part, slot_offset=start, nbytes=nbytes, layout=layout))
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class Packing:
    """Brings one expert of a layer from its raw bytes, laid out as `raw` says, into a slot, laid out as `kept` says."""

    raw: tuple[Part, ...]
    kept: tuple[Part, ...]

    def __call__(self, source: UInt8[Tensor, " span"], slot: UInt8[Tensor, " slot_bytes"]) -> None:
        """Torch on the host, kernels on a GPU, queued on the current stream. Gaps between parts stay as they are."""
        for part, to in zip(self.raw, self.kept, strict=True):
            rows = source[part.slot_offset : part.slot_offset + part.nbytes].view(1, *part.room)
            out = slot[to.slot_offset : to.slot_offset + to.nbytes].view(1, *to.room)
            REPACKED[to.layout].pack(rows, part.format, part.shape[1], out=out)
