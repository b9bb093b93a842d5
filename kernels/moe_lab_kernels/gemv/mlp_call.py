"""What the one-grid launches (`mlp`, `tiled.mlp`) share on the host: checks of a call, its scratch, its reference."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous, expect_rows
from moe_lab_kernels.gemv.hand_over import GROUP
from moe_lab_kernels.rows.hidden import Gate, check_gate, hidden_rows_ref
from moe_lab_kernels.slots.pointer_table import Weights, is_pointers

Product = Callable[..., Tensor]


class Experts(NamedTuple):
    """Gate and up [S, F, D] in one format, down [S, D, F] in another, as tensors or tables of addresses."""

    gate: Weights
    up: Weights
    down: Weights
    format: str
    down_format: str

    @property
    def weights(self) -> tuple[Weights, Weights, Weights]:
        """The three."""
        return self.gate, self.up, self.down


def limit_in(op: str, how: Gate) -> str:
    """The kernels' LIMIT. LabError for a limit or mode that `activation` does not have, and for a weight on hidden
    rows, which these kernels do not put on."""
    if how.weight is not None:
        raise LabError(f"{op} puts no weight on hidden rows; gemv_float_gated does.")
    return check_gate(op, how, 0)


def check_call(
    op: str, x: Tensor, row_of: Tensor, w: Experts, chunks: Tensor, y: Tensor, out_row: Tensor, f: int,
    store: torch.dtype,
) -> tuple[int, int, int]:  # fmt: skip
    """P, F, D, once everything holds that shapes, dtypes and strides tell of a call whose weights give F values."""
    expect(op, "x", x, FLOATS, ["R", "D"])
    expect(op, "row_of", row_of, [torch.int32], ["P"])
    expect(op, "out_row", out_row, [torch.int32], [len(row_of)])
    expect(op, "chunks", chunks, [torch.int32], ["C", 3])
    expect(op, "y", y, FLOATS, ["Y", x.shape[1]])
    if store not in FLOATS:
        raise LabError(f"{op}: store must be float32, float16 or bfloat16, got {store}.")
    if f % GROUP:
        raise LabError(f"{op}: hidden rows are quantised in groups of {GROUP} values, got F={f}.")
    if len({is_pointers(t) for t in w.weights}) > 1:
        raise LabError(f"{op}: gate, up and down are all tensors or all tables of addresses, got some of each.")
    if len({len(t) for t in w.weights}) > 1:
        raise LabError(f"{op}: gate, up and down have as many slots, got {[len(t) for t in w.weights]}.")
    for name, t in (("row_of", row_of), ("out_row", out_row), ("chunks", chunks)):
        expect_contiguous(op, name, t)
    expect_rows(op, "y", y)
    return len(row_of), f, x.shape[1]


def programs_of(op: str, chunks: int, of_f: int, of_d: int) -> int:
    """The grid of C chunks, each with `of_f` programs for gate, as many for up, `of_d` for down."""
    programs = chunks * (2 * of_f + of_d)
    if programs >= 1 << 31:
        raise LabError(
            f"{op}: C={chunks} chunks make {programs} programs, past the grid's 2^31 - 1; take them in parts."
        )
    return programs


def one_by_one(
    op: str, quantise: Callable[[Tensor, str], Any], product: Product, x: Tensor, row_of: Tensor, w: Experts,
    chunks: Tensor, y: Tensor, out_row: Tensor, f: int, how: Gate, store: torch.dtype, max_rows: int,
) -> Tensor:  # fmt: skip
    """y of a call by the references of its steps, one after another; F hidden values."""
    limit_in(op, how)
    g = torch.zeros(len(row_of), f, dtype=store, device=x.device)
    u, own = g.clone(), torch.arange(len(row_of), dtype=torch.int32, device=x.device)
    product(quantise(x, w.format), row_of, w.gate, chunks, w.format, g, w2=w.up, out2=u, max_rows=max_rows)
    h = quantise(hidden_rows_ref(g, u, how), w.down_format)
    return product(h, own, w.down, chunks, w.down_format, y, out_row=out_row, max_rows=max_rows)
