"""What a call of a layer is given, asked before any work: each input named with what came and what was wanted."""

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError, LabTypeError
from moe_lab.routing import Routing

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_rows(x: Tensor, d_model: int, device: torch.device) -> None:
    """LabTypeError and LabError for rows that are not [T, D] of a served dtype on the layer's device."""
    if not isinstance(x, Tensor):
        raise LabTypeError(f"x is a {type(x).__name__}; wanted a torch tensor [T, D].")
    if x.ndim != 2 or x.shape[1] != d_model:
        raise LabError(f"x has shape {tuple(x.shape)}; wanted [T, D] with D={d_model}.")
    if x.dtype not in DTYPES:
        raise LabTypeError(f"x is {x.dtype}; wanted float32, float16 or bfloat16.")
    if x.device != device:
        raise LabError(f"x lives on {x.device} but the layer on {device}: move one of them.")


def check_given_picks(routing: Routing | None, x: Tensor) -> None:
    """The same for picks given instead of the router's, which are of the rows."""
    if routing is None:
        return
    if not isinstance(routing, Routing):
        raise LabTypeError(f"routing is a {type(routing).__name__}; wanted a moe_lab.Routing.")
    if routing.tokens != x.shape[0] or routing.ids.device != x.device:
        raise LabError(
            f"routing holds T={routing.tokens} tokens on {routing.ids.device}, x has T={x.shape[0]} on {x.device}."
        )


def check_branch(branch: Tensor | None, x: Tensor, has_shared: bool) -> None:
    """The same for rows given instead of the shared expert's."""
    if branch is None:
        return
    if not has_shared:
        raise LabError("branch rows were given, but this layer has no shared expert.")
    if branch.shape != x.shape or branch.device != x.device:
        raise LabError(
            f"branch is {tuple(branch.shape)} on {branch.device}; wanted x's {tuple(x.shape)} on {x.device}."
        )
