"""What routing gives: the picks of T tokens, and the same picks grouped by expert.

T tokens, E experts, R scores a token (E + zero-computation experts), K picks. Knows nothing about how they were made.
"""

from dataclasses import dataclass

import torch

from moe_lab._types import Tensor
from moe_lab.card import card
from moe_lab.checks import wants_tensor
from moe_lab.errors import LabError, LabTypeError

ID_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Picks of T tokens: `ids` int32 [T, K], `weights` fp32 [T, K]; slot k is the router's rank k.

    `affected_rows` int32 0-d, on the ids' device: rows whose logits held a NaN or +inf. `width` is R and `num_experts`
    E where they are known (`route` says both): ids in E..R-1 are zero-computation experts; -1 is a skipped slot.
    LabTypeError for other dtypes, LabError for other shapes.
    """

    ids: Tensor
    weights: Tensor
    affected_rows: Tensor | None = None
    width: int | None = None
    num_experts: int | None = None

    def __post_init__(self) -> None:
        wants_tensor("Routing.ids", self.ids)
        wants_tensor("Routing.weights", self.weights)
        if self.ids.dtype not in ID_DTYPES:
            raise LabTypeError(f"Routing.ids are int32 or int64, got {self.ids.dtype}.")
        if not self.weights.is_floating_point():
            raise LabTypeError(f"Routing.weights are floating point, got {self.weights.dtype}.")
        if self.ids.ndim != 2 or self.ids.shape != self.weights.shape:
            raise LabError(
                f"Routing wants ids and weights [T, K], got {tuple(self.ids.shape)} and {tuple(self.weights.shape)}."
            )
        if self.ids.device != self.weights.device:
            raise LabError(f"Routing.ids live on {self.ids.device} but the weights on {self.weights.device}.")
        if self.ids.dtype == torch.int64 and bool((self.ids != self.ids.to(torch.int32)).any()):
            raise LabError("Routing.ids hold values beyond 32 bits.")
        object.__setattr__(self, "ids", self.ids.to(torch.int32).contiguous())
        object.__setattr__(self, "weights", self.weights.float().contiguous())
        if self.affected_rows is None:
            object.__setattr__(self, "affected_rows", torch.zeros((), dtype=torch.int32, device=self.ids.device))

    @property
    def tokens(self) -> int:
        """T."""
        return self.ids.shape[0]

    @property
    def top_k(self) -> int:
        """K."""
        return self.ids.shape[1]

    def _repr_html_(self) -> str:
        facts = {"tokens, T": self.tokens, "experts a token, K": self.top_k, "router width, R": self.width}
        return card("Routing", {**facts, "device": self.ids.device})


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPlan:
    """(token, slot) pairs sorted by expert, stable in (token, slot).

    counts int32 [E]; offsets int32 [E + 1]; token, slot int32 and weight fp32 [T*K]: pair p of expert e stands at
    offsets[e] <= p < offsets[e + 1]; entries past offsets[E] are undefined. `invalid` int32 0-d counts ids that are
    neither an expert, a zero expert nor -1 (possible on the device only; the host raises).
    """

    counts: Tensor
    offsets: Tensor
    token: Tensor
    slot: Tensor
    weight: Tensor
    invalid: Tensor
