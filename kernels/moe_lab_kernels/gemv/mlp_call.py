"""What the one-grid launches (`mlp`, `tiled_mlp`) share on the host: checks of a call, its scratch, its reference."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous, expect_rows
from moe_lab_kernels.gemv.hand_over import GROUP
from moe_lab_kernels.rows import activation
from moe_lab_kernels.rows.activation import limit_of
from moe_lab_kernels.slots.pointer_table import Weights, is_pointers

Product = Callable[..., Tensor]


def check_call(
    op: str, x: Tensor, row_of: Tensor, weights: Sequence[Weights], chunks: Tensor, y: Tensor, out_row: Tensor, f: int,
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
    if len({is_pointers(w) for w in weights}) > 1:
        raise LabError(f"{op}: gate, up and down are all tensors or all tables of addresses, got some of each.")
    if len({len(w) for w in weights}) > 1:
        raise LabError(f"{op}: gate, up and down have as many slots, got {[len(w) for w in weights]}.")
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
    op: str,
    quantise: Callable[[Tensor, str], Any],
    product: Product,
    x: Tensor,
    row_of: Tensor,
    weights: Sequence[Weights],
    chunks: Tensor,
    formats: tuple[str, str],
    y: Tensor,
    out_row: Tensor,
    *,
    f: int,
    gelu: bool,
    limit: float | None,
    limit_mode: str,
    alpha: float,
    store: torch.dtype,
    max_rows: int,
) -> Tensor:
    """y of a call by the references of its steps, one after another; F hidden values."""
    limit_of(op, limit, limit_mode, gelu=gelu)
    gate, up, down = weights
    g = torch.zeros(len(row_of), f, dtype=store, device=x.device)
    u, own = g.clone(), torch.arange(len(row_of), dtype=torch.int32, device=x.device)
    product(quantise(x, formats[0]), row_of, gate, chunks, formats[0], g, w2=up, out2=u, max_rows=max_rows)
    if gelu:
        h = activation.geglu_ref(g, u, limit=limit, limit_mode=limit_mode)
    else:
        h = activation.swiglu_ref(g, u, limit=limit, limit_mode=limit_mode, alpha=alpha)
    return product(quantise(h, formats[1]), own, down, chunks, formats[1], y, out_row=out_row, max_rows=max_rows)
