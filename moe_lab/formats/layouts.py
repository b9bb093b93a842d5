"""The layouts that experts are kept in: raw blocks as the file has them, planes, tiles. Each holds the same weights.

Which arms read which is theirs to say; what each costs and gives is in `docs/kernels.md`.
"""

from collections.abc import Mapping

from moe_lab.errors import LabError
from moe_lab.formats.planar import Planar
from moe_lab.formats.quant_tensor import QuantTensor
from moe_lab.formats.repacked import Repacked
from moe_lab.formats.tiled import Tiled

RAW = "raw"
REPACKED: dict[str, type[Repacked]] = {kind.layout: kind for kind in (Planar, Tiled)}
LAYOUTS = (RAW, *REPACKED)
Laid = QuantTensor | Repacked
"""A weight in any layout."""


def check_layout(layout: object, *others: str) -> None:
    """LabError for a name that is none of LAYOUTS, nor of `others`."""
    if layout not in (*LAYOUTS, *others):
        raise LabError(f"layout is {layout!r}; wanted {', '.join(map(repr, (*LAYOUTS, *others)))}.")


def refusal(layout: str, format: str, n: int, kd: int) -> str | None:
    """Why weights [n, kd] of a format cannot be kept in a layout; None when they can."""
    return None if layout == RAW else REPACKED[layout].refusal(format, n, kd)


def repacked(weight: Laid, layout: str, name: str = "this weight") -> Laid:
    """The weight in a layout: itself where it lies so already. LabError, with `name`, where its format has none."""
    check_layout(layout)
    if weight.layout == layout:
        return weight
    why = refusal(layout, weight.format, *weight.shape[-2:])
    if why is not None:
        raise LabError(f"{name} cannot be kept in layout {layout!r}: {why}.")
    raw = weight.to_raw()
    return raw if layout == RAW else REPACKED[layout].from_raw(raw)


def layout_of(parts: Mapping[str, Laid]) -> str:
    """The one layout of an expert's parts. LabError naming two that differ."""
    kept = {name: part.layout for name, part in parts.items()}
    first, *others = kept
    for other in others:
        if kept[other] != kept[first]:
            raise LabError(
                f"{first} lies in layout {kept[first]!r}, {other} in {kept[other]!r}; an expert's parts lie in one."
            )
    return kept[first]
