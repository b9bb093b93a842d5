"""What a grouped product is given, said once for the launchers, checks and references of every kind of rows.

One product of each pair's row with its slot's weight, or two (gate and up) and an activation.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from moe_lab._types import Float, Tensor
from moe_lab_kernels.grouped.launching import Biases, Ends, Part, ends, named, of_part, parts, places, with_bias
from moe_lab_kernels.grouped.operands import Scatter, Weight, check_alike, check_biases
from moe_lab_kernels.grouped.tiles import WorkList
from moe_lab_kernels.rows.hidden import Gate, check_gate, hidden_rows_ref

Rows = TypeVar("Rows")
Out = TypeVar("Out", covariant=True)
BothBiases = tuple[Float[Tensor, "X N"], Float[Tensor, "X N"]]  # of gate and up
SILU = Gate()


@dataclass(frozen=True, slots=True, eq=False)
class Asked(Generic[Rows, Out]):
    """`weights`: one, or gate and up, which `how` puts together; `biases`: none, or one for each weight; `to`: where a
    product's rows go (None: to rows of `out`, pair by pair)."""

    op: str
    x: Rows
    row_of: Tensor | None
    weights: tuple[Weight, ...]
    work: WorkList
    out: Out
    to: Scatter | None = None
    biases: Biases = ()
    how: Gate | None = None

    @property
    def w(self) -> Weight:
        """The weight, or gate's."""
        return self.weights[0]

    @property
    def both(self) -> tuple[Weight, Weight]:
        """Gate and up, or the one weight twice."""
        return self.weights[0], self.weights[-1]

    @property
    def pairs(self) -> int:
        """P, as the output or `to` has it."""
        if self.to is not None:
            return len(self.to.row)
        return len(self.out if isinstance(self.out, torch.Tensor) else self.out[0])  # type: ignore[index]

    def checked(self) -> str:
        """The kernels' LIMIT. LabError where gate and up cannot share a launch, or biases or the formula do not fit;
        rows, the weight's own parts and the output are for each kind of rows to check."""
        if self.how is not None:
            check_alike(self.op, *self.both)
        check_biases(self.op, self.biases, self.work, len(self.w.data), self.w.rows)
        return "none" if self.how is None else check_gate(self.op, self.how, self.pairs)

    def named(self) -> dict[str, Tensor | None]:
        """Tensors around rows and weights by name, for `backend.serve`."""
        return named(self.row_of, self.work, self.to, self.biases, self.how)

    def ends(self, mode: str) -> Ends:
        """The kernels' arguments around rows and weights."""
        return ends(self.row_of, self.work, self.to, self.biases, self.how, mode)

    def results_ref(
        self, n_x: int, dtype: torch.dtype, multiply: Callable[[Part, Weight], Tensor]
    ) -> Iterator[tuple[Part, Tensor]]:
        """(a tile's part, its rows of the output in `dtype`) of each tile with pairs, in torch. `multiply`: fp32 sums
        [n, N] of a part's rows and its slot of a weight; they pass through `dtype` before an activation."""
        for part in parts(self.row_of, n_x, self.work, len(self.w.data), self.pairs):
            sums = [with_bias(multiply(part, w), self.biases, i, part).to(dtype) for i, w in enumerate(self.weights)]
            yield part, sums[0] if self.how is None else hidden_rows_ref(sums[0], sums[1], of_part(self.how, part))

    def write_ref(self, out: Tensor, n_x: int, multiply: Callable[[Part, Weight], Tensor]) -> Tensor:
        """`out` with every result where it belongs."""
        for part, rows in self.results_ref(n_x, out.dtype, multiply):
            out[places(part, self.to)] = rows
        return out


def gate_up_of(op: str, x: Rows, row_of: Tensor | None, gate: Weight, up: Weight, work: WorkList, out: Out, how: Gate,
               biases: BothBiases | None) -> Asked[Rows, Out]:  # fmt: skip
    """As the operations of that name are given it."""
    return Asked(op, x, row_of, (gate, up), work, out, biases=biases or (), how=how)


def product_of(op: str, x: Rows, row_of: Tensor | None, w: Weight, work: WorkList, out: Out, to: Scatter | None,
               bias: Tensor | None) -> Asked[Rows, Out]:  # fmt: skip
    """Likewise."""
    return Asked(op, x, row_of, (w,), work, out, to, () if bias is None else (bias,))
