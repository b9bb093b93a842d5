"""What a difference of this layer's output does to the next layer's picks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_lab._types import Float, Tensor
from moe_lab.analysis import flips
from moe_lab.block import router_logits
from moe_lab.errors import LabError
from moe_lab.layer import MoELayer

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, eq=False)
class NextLayer:
    """The next MoE layer, and `carry`: this layer's output [T, D] -> the rows [T, D] that the next one reads.

    What lies between (residual, norms, attention) belongs to the model: `moe_lab.parity.carry.Between` computes it for
    GGUF files of the llama kind; any function of yours will do. LabError for carried rows of another shape.
    """

    layer: MoELayer
    carry: Callable[[Tensor], Tensor]

    def flips(self, out_a: Float[Tensor, "T D"], out_b: Float[Tensor, "T D"]) -> "pd.DataFrame":
        """`lab.analysis.flips` of the next layer's logits after output a against those after output b."""
        return flips(
            self._logits(out_a), self._logits(out_b), self.layer.spec.router,
            correction_bias=self.layer.router_weights.correction_bias,
            per_expert_scale=self.layer.router_weights.per_expert_scale,
        )  # fmt: skip

    def _logits(self, out: Tensor) -> Tensor:
        rows = self.carry(out)
        if rows.ndim != 2 or rows.shape != (len(out), self.layer.spec.d_model):
            raise LabError(
                f"NextLayer.carry made rows of shape {tuple(rows.shape)} of an output {tuple(out.shape)}; wanted "
                f"[T, D] = [{len(out)}, {self.layer.spec.d_model}]."
            )
        return router_logits(rows.float(), self.layer.router_weights, self.layer.spec)
