"""Weight formats whose scales stand in tensors of their own: what a code is, what a scale is, who shares one.

Rows of Kd codes, [.., N, row_bytes] bytes; 4-bit codes in pairs, the low nibble first. Scales [.., ceil(N / rows),
ceil(Kd / group)]. A value is code * step, rounded once to fp32, where the step is

    scale                          fp8_block (128 x 128 values), mxfp8, mxfp4_oss (32 values of a row)
    scale * global, scale / global nvfp4_modelopt, nvfp4_ct (16 values; one fp32 a matrix), rounded once itself
    scale, then + bias             int4_g*, int8_g* (unsigned codes), product and sum each rounded once
"""

from typing import Literal, NamedTuple

from moe_lab.errors import LabError


class ScaledLayout(NamedTuple):
    """`code`, `scale`: how their bytes are read. `group` values of a row and `rows` rows share a scale. `second`: what
    else enters the value (a bias has the shape of the scales, a multiplier or divisor one value a matrix)."""

    code: Literal["e4m3", "e2m1", "u4", "u8"]
    scale: Literal["float", "e4m3", "e8m0"]
    group: int
    rows: int = 1
    second: Literal["none", "multiplier", "divisor", "bias"] = "none"

    @property
    def code_bits(self) -> int:
        """Bits a code takes."""
        return 4 if self.code in ("e2m1", "u4") else 8

    @property
    def ragged(self) -> bool:
        """Whether the last group of a row, and the last rows, may be short."""
        return self.rows > 1


LAYOUTS: dict[str, ScaledLayout] = {
    "fp8_block": ScaledLayout("e4m3", "float", 128, rows=128),
    "nvfp4_modelopt": ScaledLayout("e2m1", "e4m3", 16, second="multiplier"),
    "nvfp4_ct": ScaledLayout("e2m1", "e4m3", 16, second="divisor"),
    "mxfp4_oss": ScaledLayout("e2m1", "e8m0", 32),
    "mxfp8": ScaledLayout("e4m3", "e8m0", 32),
    **{f"int{b}_g{g}": ScaledLayout("u4" if b == 4 else "u8", "float", g, second="bias")  # type: ignore[arg-type]
       for b in (4, 8) for g in (32, 64, 128)},
}  # fmt: skip


def layout_of(format: str) -> ScaledLayout:
    """LabError for a format without separate scales."""
    if format not in LAYOUTS:
        raise LabError(f"format {format!r} has no separate scales; formats that have: {', '.join(LAYOUTS)}.")
    return LAYOUTS[format]


def row_bytes(format: str, kd: int) -> int:
    """Bytes of a row of `kd` codes. LabError when the format wants whole groups and `kd` is not."""
    layout = layout_of(format)
    if kd < 1 or (kd % layout.group and not layout.ragged):
        raise LabError(
            f"{format} rows hold whole groups of {layout.group} values, but a row has {kd}. "
            "Pad it or pick another format."
        )
    return kd * layout.code_bits // 8


def scale_shape(format: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a tensor of logical `shape` [.., N, Kd]: short last blocks have scales too."""
    layout = layout_of(format)
    if len(shape) < 2:
        raise LabError(f"{format} describes matrices [.., N, Kd], got shape {tuple(shape)}.")
    return (*shape[:-2], -(-shape[-2] // layout.rows), -(-shape[-1] // layout.group))
