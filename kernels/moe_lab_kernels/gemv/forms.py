"""What a GEMV is compiled for: a *form*, which is a format (raw blocks), or "planar " and a format (planes)."""

from moe_lab.errors import LabError
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.planar_layout import pieces_of

LAYOUTS = ("raw", "planar")
PLANAR = "planar "


def form_of(op: str, format: str, layout: str) -> str:
    """The name of `format` in `layout`. LabError for another layout, and for a format that has no planes."""
    if layout not in LAYOUTS:
        raise LabError(f"{op} reads weights in layout {' or '.join(LAYOUTS)}, got layout={layout!r}.")
    if layout == "raw":
        return format
    pieces_of(format)
    return PLANAR + format


def format_of(form: str) -> str:
    """The format of a form."""
    return form.removeprefix(PLANAR)


def is_planar(form: str) -> bool:
    """Whether a form's weights lie in planes."""
    return form.startswith(PLANAR)


def values_of(form: str) -> int:
    """Values of a block."""
    return BLOCKS[format_of(form)].values
