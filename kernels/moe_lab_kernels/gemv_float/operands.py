"""What the float GEMV is given, and the checks that it fits together."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous, expect_rows
from moe_lab_kernels.gemv_float.steps import WALKS
from moe_lab_kernels.grouped.operands import Weight, alike
from moe_lab_kernels.rows.hidden import Gate, check_gate
from moe_lab_kernels.slots.pointer_table import as_tensor, is_pointers
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.scaled_layouts import LAYOUTS, row_bytes, scale_shape

DENSE = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
E4M3 = torch.float8_e4m3fn
X_GROUP = 128  # e4m3 activations that share a scale
MAX_CHUNK_ROWS = 8
TABLE_ALIGNMENT = 16  # of addresses in a table, where loads are wide: kernels are told of it


class Rows(NamedTuple):
    """Activation rows x [R, Kd] in fp32, fp16 or bf16; or e4m3 codes [R, Kp] with `scale` fp32 [R, ceil(Kd / 128)] as
    `quantize_fp8` makes them."""

    x: Tensor
    scale: Tensor | None = None


class Pairs(NamedTuple):
    """row_of int32 [P]: the row of x that pair p uses; chunks int32 [C, 3]: (slot, first pair, rows <= 8); `max_rows`
    (1, 2, 4, 8): the most rows that a chunk is said to hold, so that decode runs a smaller program; `to` int32 [P]: the
    row of out that pair p writes (None: row p; values are not checked)."""

    row_of: Tensor
    chunks: Tensor
    max_rows: int = MAX_CHUNK_ROWS
    to: Tensor | None = None


class Bias(NamedTuple):
    """A product's bias, fp32, fp16 or bf16 [X, N], added to the fp32 sum; `row_of` int32 [C]: each chunk's row of it
    (None: the chunk's slot; values are not checked)."""

    values: Tensor
    row_of: Tensor | None = None


def served(format: str, kd: int) -> str | None:
    """None when rows of `kd` values of the format can be multiplied, else why not."""
    if format not in WALKS:
        return f"no kernel multiplies {format!r}; there are kernels for {', '.join(WALKS)}"
    step = WALKS[format].block if format == "fp8_block" or format not in LAYOUTS else LAYOUTS[format].group
    return None if kd > 0 and kd % step == 0 else f"{format} rows are multiples of {step} values here, got Kd={kd}"


def each_chunk(pairs: Pairs, slots: int, rows: int) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor]]:
    """For the references: the number, slot, pairs and rows of x of each chunk that has any, and which rows there are
    (row 0 stands for the others)."""
    for c, (slot, first, n) in enumerate(pairs.chunks.tolist()):
        begin, end = max(first, 0), min(first + n, len(pairs.row_of))
        if 0 <= slot < slots and begin < end:
            p = torch.arange(begin, end, device=pairs.row_of.device)
            row = pairs.row_of[p].long()
            known = (row >= 0) & (row < rows)
            yield c, slot, p, torch.where(known, row, 0), known


def exact_products(x: Tensor, format: str) -> bool:
    """Whether a product of a weight's code with an activation has no more bits than fp32 holds."""
    return x.dtype != torch.float32 and format != "f32" and format not in BLOCKS


def check_call(op: str, rows: Rows, pairs: Pairs, w: Weight, out: Tensor, bias: Bias | None) -> None:
    """Everything that shapes, dtypes and strides can tell of one product."""
    check_weight(op, w)
    _check_rows(op, rows, w.kd)
    count = len(pairs.row_of)
    expect(op, "row_of", pairs.row_of, [torch.int32], ["P"])
    expect(op, "chunks", pairs.chunks, [torch.int32], ["C", 3])
    for name, t, shape in (("row_of", pairs.row_of, None), ("chunks", pairs.chunks, None), ("to", pairs.to, [count])):
        if t is not None:
            expect_contiguous(op, name, t)
        if t is not None and shape is not None:
            expect(op, name, t, [torch.int32], shape)
    if pairs.max_rows not in (1, 2, 4, MAX_CHUNK_ROWS):
        raise LabError(f"{op}: max_rows={pairs.max_rows}; it must be 1, 2, 4 or {MAX_CHUNK_ROWS}.")
    n = w.data.shape[1]
    expect(op, "out", out, FLOATS, [count if pairs.to is None else "P", n])
    expect_rows(op, "out", out)
    if bias is not None:
        expect(op, "bias", bias.values, FLOATS, ["X", n])
        expect_rows(op, "bias", bias.values)
        if bias.row_of is not None:
            expect(op, "bias.row_of", bias.row_of, [torch.int32], [len(pairs.chunks)])
            expect_contiguous(op, "bias.row_of", bias.row_of)
        elif len(bias.values) != len(w.data):
            raise LabError(
                f"{op}: {len(bias.values)} biases for {len(w.data)} slots; row_of says which chunk has which."
            )


def check_gated(op: str, gate: Weight, up: Weight, biases: tuple[Bias | None, Bias | None], how: Gate,
                count: int) -> str:  # fmt: skip
    """The kernels' LIMIT, once gate and up are known to share a launch."""
    differs = alike(gate, up)
    a, b = biases
    if differs is None and (a is None) != (b is None):
        differs = "one of gate and up has a bias"
    if differs is None and a is not None and b is not None:
        same = (a.values.dtype, a.values.shape, a.values.stride()) == (
            b.values.dtype,
            b.values.shape,
            b.values.stride(),
        )
        same &= a.row_of is b.row_of
        differs = None if same else "the biases of gate and up have other dtypes, shapes, strides or rows"
    if differs is not None:
        raise LabError(f"{op}: {differs}; two gemv_float and an activation take any.")
    return check_gate(op, how, count)


def _check_rows(op: str, rows: Rows, kd: int) -> None:
    """Activations: dtype, width, and addresses that wide loads can take."""
    if rows.scale is None:
        expect(op, "x", rows.x, FLOATS, ["R", kd])
        expect_rows(op, "x", rows.x)
        return
    padded = -(-kd // X_GROUP) * X_GROUP
    expect(op, "x", rows.x, [E4M3], ["R", padded])
    expect(op, "x's scales", rows.scale, [torch.float32], [len(rows.x), padded // X_GROUP])
    expect_rows(op, "x", rows.x)
    expect_rows(op, "x's scales", rows.scale)


def check_weight(op: str, w: Weight) -> None:
    """Shapes of a weight's parts, and the addresses its loads need."""
    why = served(w.format, w.kd)
    if why is not None:
        raise LabError(f"{op}: {why}.")
    table = is_pointers(w.data)
    if table and w.format not in BLOCKS and w.data.data_ptr() % TABLE_ALIGNMENT:
        raise LabError(
            f"{op}: the addresses of {w.format} slots are multiples of {TABLE_ALIGNMENT} bytes, of these only of "
            f"{w.data.data_ptr() & -w.data.data_ptr()}."
        )
    if w.format in DENSE:
        expect(op, "w", w.data, [DENSE[w.format]], ["S", "N", w.kd])
        expect_rows(op, "w", w.data)
        return
    if w.format in BLOCKS:
        block = BLOCKS[w.format]
        expect(op, "w", w.data, [torch.uint8], ["S", "N", w.kd // block.values * block.bytes])
        expect_rows(op, "w", w.data, block.alignment)
        return
    layout = LAYOUTS[w.format]
    expect(op, "w", w.data, [torch.uint8], ["S", "N", row_bytes(w.format, w.kd)])
    expect_rows(op, "w", w.data, 1 if layout.code == "e4m3" else min(16, layout.group // 2))
    shape, bias = scale_shape(w.format, (*w.data.shape[:2], w.kd)), layout.second == "bias"
    for name, t, dtypes, wanted in (
        ("scales", w.scales, FLOATS if layout.scale == "float" else [torch.uint8], shape),
        ("second", w.second, FLOATS if bias else [torch.float32], shape if bias else shape[:1]),
    ):
        if (t is None) != (name == "second" and layout.second == "none"):
            raise LabError(f"{op}: {w.format} wants {'no' if t is not None else 'a'} {name}.")
        if t is not None and (is_pointers(t) != table) and (name == "scales" or bias):
            raise LabError(f"{op}: of w and its {name} one is a tensor, one a table of addresses; wanted two alike.")
        if t is not None:
            expect(op, name, as_tensor(t), dtypes, wanted)
            expect_rows(op, name, as_tensor(t))
