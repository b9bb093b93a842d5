"""`moe-lab simulate`: what a cache of so many slots would have read on a recorded trace, policy by policy."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from moe_lab.caching import controls
from moe_lab.caching.study import POLICIES, study
from moe_lab.errors import LabError
from moe_lab.open import open as open_checkpoint
from moe_lab.simulate import BOUNDS, simulate
from moe_lab.simulate.replay import AnyPolicy
from moe_lab.stream.policy import policy_of
from moe_lab.stream.source import ExpertSource
from moe_lab.trace import RoutingTrace

Rows = list[dict[str, Any]]


def simulate_rows(
    file: Path,
    *,
    capacity: str | None,
    policies: str | None,
    per_layer: bool,
    step_tokens: int,
    tokens: int | None,
    experts: int | None,
    with_controls: bool,
    model: Path | None,
    as_json: bool,
) -> tuple[Rows, list[str]]:
    """Rows and notes. For people a row for each (capacity, policy), layers summed, with the share of the gap from LRU
    to the optimum; in JSON one for each (order, capacity, policy, layer) with the columns of `lab.simulate`.
    """
    trace = RoutingTrace.load(file, num_experts=experts, tokens=None if tokens is None else (0, tokens))
    total = len(trace.layers) * trace.num_experts
    slots = _capacities(capacity) if capacity is not None else [max(len(trace.layers), total // 4)]
    chosen = [_policy(text) for text in (policies.split(",") if policies is not None else POLICIES)]
    orders = controls(trace) if with_controls else {"text": trace}
    how: dict[str, Any] = {"per_layer": per_layer, "step_tokens": step_tokens}
    sizes = None if model is None else _sizes(model, trace)
    if as_json:
        rows: Rows = []
        for order, one in orders.items():
            table = simulate(one, slots, chosen, expert_bytes=sizes, **how)
            rows += [{"order": order, **row} for row in table.to_dict("records")]
        return rows, []
    table = study(orders, slots, chosen, expert_bytes=sizes, **how)
    rows = [_short(row) for row in table.sort_values("hit_rate", kind="stable").to_dict("records")]
    rows.sort(key=lambda row: (row["slots"], row["order"] != "text"))
    return rows, _notes(trace, total, per_layer)


def _short(row: dict[str, Any]) -> dict[str, Any]:
    short = {name: row[name] for name in ("policy", "order", "requests", "misses", "hit_rate")}
    short = {"slots": row["capacity_slots"], "of experts": f"{row['capacity_share']:.1%}", **short}
    short["gap closed"] = None if row["gap_closed"] != row["gap_closed"] else row["gap_closed"]
    if row["bytes_read"] == row["bytes_read"]:
        short["read, GB"] = row["bytes_read"] / 1e9
    return short


def _notes(trace: RoutingTrace, total: int, per_layer: bool) -> list[str]:
    split = "slots split over the layers" if per_layer else "slots shared by all layers"
    return [
        f"{trace.tokens:,} tokens, {len(trace.layers)} layers of {trace.num_experts} experts ({total:,}), {split}",
        "gap closed: 0 is LRU, 1 the optimum (belady)",
    ]


def _capacities(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise LabError(f"--capacity {text}: wanted slots as whole numbers, with commas: 24,48.") from None


def _policy(text: str) -> AnyPolicy:
    """A policy as `moe_lab.stream.policy.policy_of` reads it, or a bound."""
    name, options, _ = text.strip().partition(":")
    if name not in BOUNDS:
        return policy_of(text)
    if options:
        raise LabError(f"--policies {text}: {name} takes no options.")
    return name


def _sizes(model: Path, trace: RoutingTrace) -> dict[int, int]:
    """File bytes of one expert of each layer of the trace."""
    with ExitStack() as stack:
        source = ExpertSource.from_checkpoint(stack.enter_context(open_checkpoint(model)))
        if lacking := [layer for layer in trace.layers if layer not in source.layers]:
            raise LabError(f"--model {model}: the trace has layer {lacking[0]}, the file {list(source.layers)}.")
        return {layer: source.expert_nbytes(layer) for layer in trace.layers}
