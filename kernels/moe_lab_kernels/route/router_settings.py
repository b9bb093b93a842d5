"""A router's settings on their way into a kernel: what is served, how a row is laid out, compile-time constants.

The kernels know a router only by the fields read here; `moe_lab.RouterSpec` has them all and means what they mean.
"""

from typing import Any, Protocol, runtime_checkable

import torch

from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.checks import FLOATS, expect

REFERENCE = "moe_lab.route(..., backend='torch')"
WIDEST, MOST_PICKS, MOST_PADDED = 1024, 16, 2048
# fp32 values that one warp loads at a time, 16 bytes a lane; rows that start unaligned are loaded 4 bytes a lane
LANES_ALIGNED, LANES = 128, 32


@runtime_checkable
class Router(Protocol):
    """The settings a router has; `moe_lab.RouterSpec` is one."""

    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def score(self) -> str: ...
    @property
    def weights_from(self) -> str: ...
    @property
    def normalize(self) -> bool: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def norm_kind(self) -> str: ...
    @property
    def scale(self) -> float: ...
    @property
    def scale_on(self) -> str: ...
    @property
    def n_group(self) -> int: ...
    @property
    def topk_group(self) -> int: ...
    @property
    def group_score(self) -> str: ...
    @property
    def group_fill(self) -> float: ...
    @property
    def hash_routing(self) -> bool: ...
    @property
    def temperature(self) -> float: ...
    @property
    def softcap(self) -> float | None: ...


def unserved(spec: Router) -> str | None:
    """Why the kernels do not serve this router, or None where they do."""
    if spec.hash_routing:
        return "hash routing reads its ids from a table"
    if spec.weights_from == "sparsemixer":
        return "weights_from='sparsemixer' picks in two rounds"
    if spec.width > WIDEST or spec.top_k > MOST_PICKS:
        return f"R={spec.width}, K={spec.top_k} are beyond R <= {WIDEST}, K <= {MOST_PICKS}"
    columns = _columns(spec, aligned=True)
    if columns["C"] * columns["L"] > MOST_PADDED:
        return f"n_group={spec.n_group} groups of {spec.width // spec.n_group} pad to more than {MOST_PADDED} columns"
    return None


def warps_of(columns: int) -> int:
    """Warps a row: beyond 256 columns one warp has too many values to itself (R=384, T=1: 8.8 us on an H200)."""
    return 1 if columns <= 256 else 4


def check(
    op: str, logits: torch.Tensor, spec: Router, bias: torch.Tensor | None, per_expert_scale: torch.Tensor | None
) -> None:
    """What the host can tell: dtypes, widths, and whether the kernels serve this router at all."""
    expect(op, "logits", logits, FLOATS, ["T", spec.width])
    for name, v, n in (("correction_bias", bias, spec.width), ("per_expert_scale", per_expert_scale, spec.num_experts)):
        if v is not None:
            expect(op, name, v, FLOATS, [n])
    why = unserved(spec)
    if why:
        raise LabError(f"{op} does not serve this router: {why}. {REFERENCE} does.")


def contiguous(logits: torch.Tensor, given: dict[str, torch.Tensor | None]) -> list[torch.Tensor]:
    """The optional vectors as the kernel indexes them; logits stand for absent ones and are not read."""
    return [logits if v is None else v.contiguous() for v in given.values()]


def settings(logits: torch.Tensor, spec: Router, bias: bool, per_expert: bool) -> dict[str, Any]:
    """The router as compile-time constants of `choose` (ROWS aside)."""
    aligned = logits.stride(0) % 16 == 0 and logits.stride(1) == 1 and logits.data_ptr() % 16 == 0
    norm = spec.norm_kind if spec.normalize else "none"
    return {
        **{"R": spec.width, "E": spec.num_experts, "K": spec.top_k, "K_PAD": backend.next_power_of_2(spec.top_k)},
        **_columns(spec, aligned),
        **{"GROUPS": spec.n_group, "KEEP": spec.topk_group, "TOP2": spec.group_score == "top2_sum"},
        **{"FILL": float(spec.group_fill), "BIAS": bias, "SCORE": spec.score, "FROM": spec.weights_from},
        **{"TEMPERATURE": float(spec.temperature), "SOFTCAP": float(spec.softcap or 0.0)},
        **{"NORM": norm, "EPS": float(spec.norm_eps)},
        **{"SCALE": float(spec.scale) if spec.scale_on == "weights" else 1.0, "PER_EXPERT": per_expert},
    }


def _columns(spec: Router, aligned: bool) -> dict[str, int]:
    """A row as [C, L]; with groups, each on GROUP columns of its own inside one L."""
    lanes = LANES_ALIGNED if aligned else LANES
    if spec.n_group == 1:
        group, columns = 1, backend.next_power_of_2(spec.width)
    else:
        group = backend.next_power_of_2(spec.width // spec.n_group)
        columns = group * backend.next_power_of_2(spec.n_group)
    length = min(max(lanes, group), columns)
    return {"C": columns // length, "L": length, "GROUP": group}
