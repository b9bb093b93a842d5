"""What the grouped GEMM is given: weights of any format, where rows go, and the checks that they fit."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous, expect_rows
from moe_lab_kernels.dequantize.dequantize import dequantize_ref
from moe_lab_kernels.dequantize.scaled import dequantize_scaled_ref
from moe_lab_kernels.grouped.steps import STEPS
from moe_lab_kernels.grouped.tiles import TOKENS, WorkList
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.planar_layout import rows_in
from moe_lab_kernels.storage.row_tiles import ROWS
from moe_lab_kernels.storage.scaled_layouts import LAYOUTS, row_bytes, scale_shape

DENSE = {"bf16": torch.bfloat16, "f16": torch.float16}
OPERANDS = (torch.bfloat16, torch.float16)


class Weight(NamedTuple):
    """Weights [S, N, Kd] of a format: `data` floats [S, N, Kd] (bf16, f16) or bytes [S, N, row_bytes]; formats with
    separate scales have `scales`, and `second` where they need it (as `dequantize_scaled`). `layout` "planar": bytes
    [S, 1, planes'], as `storage.planar_layout` has them, "tiles": as `storage.row_tiles` has them; what reads raw rows
    alone refuses them."""

    data: Tensor
    format: str
    kd: int
    scales: Tensor | None = None
    second: Tensor | None = None
    layout: str = "raw"

    @property
    def rows(self) -> int:
        """N. LabError for planes of no such weight."""
        if self.layout == "planar":
            return rows_in("weight", self.format, self.data.shape[-1], self.kd)
        return self.data.shape[1] * (ROWS if self.layout == "tiles" else 1)


class Scatter(NamedTuple):
    """Pair p goes to row row[p] * slots + slot[p] of the output; row, slot int32 [P], as a plan's token and slot."""

    row: Tensor
    slot: Tensor
    slots: int


def values_ref(w: Weight, slot: int, dtype: torch.dtype) -> Tensor:
    """One slot's weights [N, Kd] as the kernel multiplies them: decoded in fp32, rounded once to `dtype`."""
    if w.format in DENSE:
        return w.data[slot].to(dtype)
    if w.format in BLOCKS:
        return dequantize_ref(w.data[slot].contiguous(), w.format, dtype)
    parts = (None if t is None else t[slot] for t in (w.scales, w.second))
    scales, second = parts
    assert scales is not None
    return dequantize_scaled_ref(w.data[slot], scales, w.format, w.kd, second=second, out_dtype=dtype)


def alike(gate: Weight, up: Weight) -> str | None:
    """None when one launch can walk both matrices side by side, else what differs."""
    if (gate.format, gate.kd) != (up.format, up.kd):
        return f"gate is {gate.format} with Kd={gate.kd}, up {up.format} with Kd={up.kd}"
    if gate.layout != up.layout:
        return f"gate lies in layout {gate.layout!r}, up in {up.layout!r}"
    for name in ("data", "scales", "second"):
        a, b = getattr(gate, name), getattr(up, name)
        if a is None or b is None:
            if a is not b:
                return f"one of gate and up has no {name}"
        elif (a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype):
            return (
                f"{name} of gate is {a.dtype} {list(a.shape)} with strides {a.stride()}, that of up {b.dtype} "
                f"{list(b.shape)} with strides {b.stride()}"
            )
    return None


def check_alike(op: str, gate: Weight, up: Weight) -> None:
    """LabError where gate and up cannot share a launch."""
    differs = alike(gate, up)
    if differs is not None:
        raise LabError(f"{op}: {differs}; two products and an activation take any.")


def check_biases(op: str, biases: Sequence[Tensor], work: WorkList, slots: int, columns: int) -> None:
    """[X, N] of one dtype and one shape and stride; which row a tile has is `work.expert`'s matter, whose values are
    not checked, or its slot's."""
    for i, bias in enumerate(biases):
        name = f"bias {i}" if len(biases) > 1 else "bias"
        expect(op, name, bias, FLOATS, ["X", columns])
        expect_rows(op, name, bias)
        if (bias.dtype, bias.shape, bias.stride()) != (biases[0].dtype, biases[0].shape, biases[0].stride()):
            raise LabError(f"{op}: the biases of gate and up have other dtypes, shapes or strides; make them alike.")
    if work.expert is not None:
        expect(op, "tiles' experts", work.expert, [torch.int32], [len(work.tiles)])
    elif biases and len(biases[0]) != slots:
        raise LabError(f"{op}: {len(biases[0])} biases for {slots} slots; WorkList.expert says which tile has which.")


def check_call(op: str, x: Tensor, row_of: Tensor | None, w: Weight, work: WorkList, out: Tensor,
           to: Scatter | None) -> None:  # fmt: skip
    """Everything that shapes, dtypes and strides can tell."""
    expect(op, "x", x, OPERANDS, ["R", w.kd])
    expect_rows(op, "x", x)
    check_weight(op, w)
    check_list(op, row_of, work, w.data.shape[1], out, to)


def check_list(op: str, row_of: Tensor | None, work: WorkList, columns: int, out: Tensor, to: Scatter | None) -> None:
    """The pairs' rows, places and tiles, and the output, whatever is multiplied."""
    check_pairs(op, row_of, work, len(out) if to is None else len(to.row), to)
    expect(op, "out", out, FLOATS, ["P", columns])
    expect_rows(op, "out", out)


def check_pairs(op: str, row_of: Tensor | None, work: WorkList, pairs: int, to: Scatter | None) -> None:
    """The pairs' rows, places and tiles."""
    for name, t, shape in (
        ("row_of", row_of, [pairs]),
        ("row", to and to.row, [pairs]),
        ("slot", to and to.slot, [pairs]),
        ("tiles", work.tiles, ["tiles", 3]),
    ):
        if t is not None:
            expect(op, name, t, [torch.int32], shape)
            expect_contiguous(op, name, t)
    if work.tokens not in TOKENS or (to is not None and to.slots < 1):
        raise LabError(
            f"{op}: tiles of {work.tokens} rows and {to and to.slots} slots; wanted {TOKENS} and at least 1."
        )


def check_weight(op: str, w: Weight) -> None:
    """Shapes of a weight's parts, and the addresses its loads need."""
    if w.format not in STEPS:
        raise LabError(f"{op} multiplies no {w.format!r}; it multiplies {', '.join(STEPS)}.")
    if w.layout != "raw":
        raise LabError(f"{op} reads raw rows, and this weight is in layout {w.layout!r}.")
    if w.format in DENSE:
        expect(op, "w", w.data, [DENSE[w.format]], ["S", "N", w.kd])
        expect_rows(op, "w", w.data)
        return
    if w.format in BLOCKS:
        block = BLOCKS[w.format]
        if w.kd < 1 or w.kd % block.values:
            raise LabError(f"{op}: {w.format} rows hold whole blocks of {block.values} values, got Kd={w.kd}.")
        expect(op, "w", w.data, [torch.uint8], ["S", "N", w.kd // block.values * block.bytes])
        expect_rows(op, "w", w.data, block.alignment)
        return
    layout = LAYOUTS[w.format]
    expect(op, "w", w.data, [torch.uint8], ["S", "N", row_bytes(w.format, w.kd)])
    shape = scale_shape(w.format, (*w.data.shape[:2], w.kd))
    bias = layout.second == "bias"
    for name, t, dtypes, wanted in (
        ("scales", w.scales, FLOATS if layout.scale == "float" else [torch.uint8], shape),
        ("second", w.second, FLOATS if bias else [torch.float32], shape if bias else shape[:1]),
    ):
        if (t is None) != (name == "second" and layout.second == "none"):
            raise LabError(f"{op}: {w.format} wants {'no' if t is not None else 'a'} {name}.")
        if t is not None:
            expect(op, name, t, dtypes, wanted)
            expect_rows(op, name, t)
    expect_rows(op, "w", w.data)
