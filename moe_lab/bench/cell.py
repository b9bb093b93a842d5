"""One situation to measure: a layer, rows, picks, and what no arm can do without.

T tokens, D model width, K picks; R is how many (rows, picks) pairs the rotation walks through.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from moe_lab._types import Float, Tensor
from moe_lab.arms import ExpertStack
from moe_lab.bench.workloads import LayerShape
from moe_lab.errors import LabError
from moe_lab.formats.layouts import Laid
from moe_lab.layer import MoELayer, Options
from moe_lab.routing import Routing
from moe_lab.runs import Case
from moe_lab.stream.provider import ResidentExperts, StreamedExperts
from moe_lab.tolerances import tol

State = Literal["cold", "warm"]
STATES: tuple[State, ...] = ("cold", "warm")
MOST_CALLS = 512  # in one pass over a rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How hard to measure; the defaults suit a laptop and a GPU alike.

    `budget_s`: nothing is started after so much time. `cell_ms`: clock time an arm gets in one state, between `least`
    and `most` repetitions. `states`: "cold", weights from memory, "warm", the same ones again. `tolerance`: the row of
    the tolerance table that the check goes by (None: the arm's own, `layer_tolerance`). `shrink`: named shapes are
    divided by it (None: 8 on a CPU, 1 on a GPU).
    """

    budget_s: float = 60.0
    cell_ms: float = 100.0
    least: int = 5
    most: int = 60
    states: tuple[State, ...] = STATES
    seed: int = 0
    tolerance: str | None = None
    shrink: int | None = None

    def __post_init__(self) -> None:
        if self.tolerance is not None:
            tol(self.tolerance)
        if not self.states or set(self.states) - set(STATES):
            raise LabError(f"states are {self.states!r}; wanted some of {', '.join(STATES)}.")
        if not 1 <= self.least <= self.most or not self.budget_s > 0 or not self.cell_ms > 0:
            raise LabError(
                f"wanted 1 <= least <= most and times above 0, got least={self.least}, most={self.most}, "
                f"budget_s={self.budget_s}, cell_ms={self.cell_ms}."
            )


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """`x` [R, T, D], a routing each, and the case they make (without a state)."""

    layer: MoELayer
    x: Float[Tensor, "R T D"]
    routings: Sequence[Routing]
    case: Case
    options: Options = field(default_factory=Options)

    @property
    def format(self) -> str:
        """The weights' formats: "q2_k+q3_k" is gate and up, then down; equal neighbours once."""
        names = self.layer.experts.formats
        return "+".join(name for i, name in enumerate(names) if i == 0 or name != names[i - 1])

    @property
    def streamed(self) -> bool:
        """Whether experts come through a cache, which then decides what is cold."""
        return not isinstance(self.layer.experts, ResidentExperts)

    @property
    def weight_bytes(self) -> float:
        """Bytes of the experts that a call hits, each once, averaged over the rotation; the shared expert with them."""
        spec, held = self.layer.spec, self.layer.experts
        own = [len(r.ids[(r.ids >= 0) & (r.ids < spec.num_experts)].unique()) for r in self.routings]
        streamed = isinstance(held, StreamedExperts)
        expert = held.source.expert_nbytes(held.layer) if streamed else held.stack.expert_bytes
        shared = 0 if self.layer.shared_stack is None else self.layer.shared_stack.expert_bytes
        return sum(own) / len(own) * expert + shared

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows in and out."""
        return 2 * self.x[0].numel() * self.x.element_size()

    @property
    def flops(self) -> dict[str, float]:
        """Multiplies and adds of one call's products by weight format, averaged over the rotation."""
        spec, total = self.layer.spec, Counter[str]()
        pairs = [int(((r.ids >= 0) & (r.ids < spec.num_experts)).sum()) for r in self.routings]
        for name in self.layer.experts.formats:
            total[name] += 2 * sum(pairs) / len(pairs) * spec.d_expert * spec.d_routed  # type: ignore[assignment]
        if self.layer.shared is not None and spec.shared is not None:
            for name in self.layer.shared.formats:
                total[name] += 2 * self.x.shape[1] * spec.shared.d_expert * spec.d_model
        return dict(total)


def clone(layer: MoELayer) -> MoELayer:
    """The layer with a copy of its experts' bytes: the same values at other addresses."""
    held = layer.experts
    if not isinstance(held, ResidentExperts):
        raise LabError("a streamed layer's weights live in its cache's slots; there is nothing to copy.")
    stack, twin = held.stack, copy.copy(layer)
    gate = stack.parts.get("gate")
    parts = None if gate is None else _copied(gate), _copied(stack.up), _copied(stack.down)
    twin.experts = ResidentExperts(ExpertStack(*parts, stack.slot_of, stack.biases))
    return twin


def _copied(q: Laid) -> Laid:
    return replace(q, **{name: t.clone() for name, t in q.tensors.items()})


def case_of(shape: LayerShape, workload: str, tokens: int) -> Case:
    """A case of this shape."""
    return Case(
        workload=workload, model=shape.name, d_model=shape.d_model, d_expert=shape.d_expert, experts=shape.experts,
        top_k=shape.top_k, tokens=tokens,
    )  # fmt: skip


def l2_bytes(device: torch.device) -> int:
    """The last cache before memory: the GPU's L2, or what Linux says of the CPU (64 MiB where it says nothing)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    kib = [int(size[:-1]) * {"K": 1, "M": 1024}[size[-1]] for size in sizes if size[-1:] in ("K", "M")]
    return max(kib, default=65536) * 1024
