"""`gemv` on a resident layer's experts in tiles of 16 rows, made once: see `moe_lab_kernels.gemv.tiled`.

    arm = TiledGemv(layer.experts.stack)
    y = layer(x, arm)

The arithmetic is `gemv`'s (q8_1 rows, exact integer dots, fp32 sums), added in another order, so last bits differ from
that arm's; within this one bits are the same alone and in chunks, on the host's groups and the device's, in a graph.
The tiles take the experts' memory a second time. A GPU fetches them 16 bytes a lane and multiplies them on its tensor
cores: up to 1.6 times as quick as raw blocks, least at one token (`docs/kernels.md` has the times).
"""

from collections.abc import Sequence

import torch

from moe_lab._types import Tensor
from moe_lab.arms.base import ArmContext, ExpertStack
from moe_lab.arms.gemv import Gemv
from moe_lab.arms.gemv_float import is_plain
from moe_lab.errors import LabError, LabTypeError
from moe_lab.spec import MoESpec
from moe_lab_kernels.storage.row_tiles import refusal, to_tiles


class TiledGemv(Gemv):
    """Made for one layer's experts, which it keeps a second time. LabError for weights that have no tiles."""

    name = "gemv_tiled"

    def __init__(self, stack: ExpertStack) -> None:
        if not isinstance(stack, ExpertStack):
            raise LabTypeError(
                f"TiledGemv puts resident experts into tiles: give layer.experts.stack, got {type(stack).__name__}."
            )
        for part, q in stack.parts.items():
            why = refusal(q.format, *q.shape[-2:])
            if why is not None:
                raise LabError(f"TiledGemv: the {part} projections have no tiles: {why}.")
        if stack.gate.format != stack.up.format:
            raise LabError(f"TiledGemv: gate and up share a format, got {stack.gate.format} and {stack.up.format}.")
        self._made_for = {part: q.data for part, q in stack.parts.items()}
        self._gate, self._up, self._down = (
            to_tiles(q.data, q.format, q.shape[-1]) for q in (stack.gate, stack.up, stack.down)
        )

    @property
    def nbytes(self) -> int:
        """Bytes that the tiles take."""
        return sum(t.numel() for t in (self._gate, self._up, self._down))

    def supports(self, formats: Sequence[str], backend: str) -> str | None:
        """As `gemv`, which serves a shared expert of any of its formats here too, where kernels run."""
        if backend == "torch":
            return "its kernels run on a GPU or in Triton's interpreter"
        return super().supports(formats, backend)

    def lacks(self, spec: MoESpec) -> str | None:
        """As `gemv`, without biases and with the routing weight at the output."""
        if spec.expert_bias:
            return "expert biases"
        if spec.weight_place != "output":
            return f"routing weight at {spec.weight_place!r}"
        return super().lacks(spec)

    def meets(self, formats: Sequence[str], activation: str) -> str | None:
        """Rows become q8_1 here."""
        return None if activation == "q8_1" else "its rows are q8_1"

    def fuses(self, formats: Sequence[str]) -> str | None:
        """Never: tiles are of the routed experts alone."""
        return "the tiles are of the routed experts alone"

    def shared(self, x: Tensor, stack: ExpertStack, ctx: ArmContext) -> Tensor:
        """The shared expert as `gemv` computes it, from raw blocks: one expert has no need of tiles."""
        return Gemv().shared(x, stack, ctx)

    def _mlp(
        self,
        x: Tensor,
        token: Tensor,
        stack: ExpertStack,
        table: Tensor,
        most_rows: int,
        ctx: ArmContext,
        out: Tensor,
        out_row: Tensor,
        weight: Tensor | None = None,
        bias_of: Tensor | None = None,
    ) -> Tensor:
        """See `Gemv._mlp`."""
        from moe_lab_kernels.gemv.tiled_mlp import gemv_tiled_mlp

        if any(stack.part(part).data is not data for part, data in self._made_for.items()):
            raise LabError(
                "TiledGemv: this layer's experts are not those whose tiles the arm holds; make one for it with "
                "TiledGemv(layer.experts.stack), which wants experts that stay in memory."
            )
        if not is_plain(stack, ctx):
            raise LabError("TiledGemv: it takes q8_1 rows and a clamp before the activation; take gemv.")
        most = 1 << max(0, most_rows - 1).bit_length()
        how = {"gelu": ctx.spec.activation == "gelu_tanh", "limit": ctx.spec.limit, "store": ctx.store_dtype}
        return gemv_tiled_mlp(
            x, token.to(torch.int32), self._gate, self._up, self._down, table, stack.gate.format, stack.down.format,
            out, out_row.to(torch.int32), max_rows=most, empty=ctx.empty, **how,
        )  # fmt: skip
