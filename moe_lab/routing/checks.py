"""What routing is given, asked before it works: each tensor named with the shape that came and the one wanted."""

from moe_lab._types import Tensor
from moe_lab.checks import wants, wants_tensor
from moe_lab.errors import LabError, LabTypeError
from moe_lab.routing.picks import ID_DTYPES, Routing
from moe_lab.spec import RouterSpec


def check_logits(logits: Tensor, spec: RouterSpec) -> None:
    """LabTypeError for what is no tensor or no RouterSpec."""
    wants_tensor("logits", logits)
    wants("spec", spec, RouterSpec, "a RouterSpec (of a MoESpec: spec.router)")


def check_route(
    logits: Tensor,
    spec: RouterSpec,
    bias: Tensor | None,
    table: Tensor | None,
    token_ids: Tensor | None,
    per_expert_scale: Tensor | None,
) -> None:
    """LabTypeError for other types and dtypes, LabError for shapes or ids that do not fit the router."""
    check_logits(logits, spec)
    given = {"correction_bias": bias, "hash_table": table, "token_ids": token_ids, "per_expert_scale": per_expert_scale}
    for name, tensor in given.items():
        if tensor is not None:
            wants_tensor(name, tensor)
    if not logits.is_floating_point():
        raise LabTypeError(f"logits are floating point [T, R], got {logits.dtype}.")
    if logits.ndim != 2 or logits.shape[1] != spec.width:
        raise LabError(
            f"logits have shape {tuple(logits.shape)}, but the router scores R={spec.width} "
            f"({spec.num_experts} experts + {spec.zero_experts} zero experts): wanted [T, {spec.width}]."
        )
    if bias is not None and tuple(bias.shape) != (spec.width,):
        raise LabError(
            f"correction_bias has shape {tuple(bias.shape)}; wanted [R] = [{spec.width}], zero experts included."
        )
    if bias is not None and spec.weights_from == "sparsemixer":
        raise LabError("weights_from='sparsemixer' ranks the logits themselves: a correction_bias would do nothing.")
    if per_expert_scale is not None and tuple(per_expert_scale.shape) != (spec.num_experts,):
        raise LabError(
            f"per_expert_scale has shape {tuple(per_expert_scale.shape)}; wanted [E] = [{spec.num_experts}]."
        )
    if spec.hash_routing:
        _check_hash(logits, spec, table, token_ids)
    elif table is not None:
        raise LabError("a hash_table was given, but spec.hash_routing is False.")


def _check_hash(logits: Tensor, spec: RouterSpec, table: Tensor | None, token_ids: Tensor | None) -> None:
    if table is None or token_ids is None:
        missing = "hash_table" if table is None else "token_ids"
        raise LabError(f"hash routing takes experts from tid2eid[token_id]: {missing} is missing.")
    for name, t in (("hash_table", table), ("token_ids", token_ids)):
        if t.dtype not in ID_DTYPES:
            raise LabTypeError(f"{name} is int32 or int64, got {t.dtype}.")
    if table.ndim != 2 or table.shape[1] != spec.top_k:
        raise LabError(f"hash_table has shape {tuple(table.shape)}; wanted [V, K] with K={spec.top_k}.")
    if tuple(token_ids.shape) != (logits.shape[0],):
        raise LabError(f"token_ids have shape {tuple(token_ids.shape)}; wanted [T] = [{logits.shape[0]}].")
    if not logits.is_cuda:  # on the device `route` skips and counts: a look from the host would stop a graph
        _refuse_unhashed(table, token_ids, spec.width)


def _refuse_unhashed(table: Tensor, token_ids: Tensor, width: int) -> None:
    if table.numel() and (int(table.min()) < 0 or int(table.max()) >= width):
        raise LabError(f"hash_table holds expert ids {int(table.min())}..{int(table.max())}; wanted 0..{width - 1}.")
    outside = (token_ids < 0) | (token_ids >= table.shape[0])
    if bool(outside.any()):
        at = int(outside.nonzero()[0])
        raise LabError(f"token_ids[{at}] is {int(token_ids[at])}, outside the hash table's 0..{table.shape[0] - 1}.")


def refuse_affected(bad: Tensor) -> None:
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise LabError(f"row {row} of the logits holds NaN or +inf ({int(bad.sum())} of {len(bad)} rows do).")


def check_picks(routing: Routing, num_experts: int) -> int:
    """The width that picks of `num_experts` experts have. LabError where the routing says another E (ids beyond it
    would be taken for zero-computation experts), and on a CPU, where the host may look, for an id that is none."""
    if routing.num_experts is not None and num_experts != routing.num_experts:
        raise LabError(
            f"num_experts={num_experts}, but these picks are of a router of E={routing.num_experts} experts."
        )
    if routing.width is not None and num_experts > routing.width:
        raise LabError(f"num_experts={num_experts}, but these picks are of a router of R={routing.width} scores.")
    width = max(num_experts, routing.width or num_experts)
    if not routing.ids.is_cuda:
        _refuse_invalid(routing.ids, width)
    return width


def _refuse_invalid(ids: Tensor, width: int) -> None:
    wrong = (ids < -1) | (ids >= width)
    if bool(wrong.any()):
        token, slot = (int(v) for v in wrong.nonzero()[0])
        raise LabError(f"routing.ids[{token}, {slot}] is {int(ids[token, slot])}; wanted -1 (skip) or 0..{width - 1}.")
