"""One policy over all requests of a trace: how many experts each request has to read."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_lab.checks import came
from moe_lab.errors import LabError, LabTypeError
from moe_lab.simulate.bounds import BELADY, BELADY_BYPASS, BOUNDS, INFINITE, Belady, BypassTable, EndlessTable
from moe_lab.simulate.requests import Request
from moe_lab.stream.policy import POLICIES, Policy, policy_factory, policy_name, unknown_policy
from moe_lab.stream.slots import SlotTable, introduce

AnyPolicy = str | Policy | Any


def misses_of(requests: Sequence[Request], shares: Mapping[int, range], policy: AnyPolicy) -> list[int]:
    """Experts read, for each request. `shares`: the slots that each layer may use; requests must fit them."""
    tables = {share: _table(requests, shares, share, policy) for share in set(shares.values())}
    introduce(table for table in tables.values() if isinstance(table, SlotTable))
    table_of = {layer: tables[share] for layer, share in shares.items()}
    found = []
    for request in requests:
        table = table_of[request.layer]
        missing = table.take(request.keys)
        assert missing is not None  # a wave fits, and nothing else is held
        found.append(len(missing))
        for key in request.keys:
            table.put_back(key)
    return found


def check_policies(policies: Sequence[AnyPolicy]) -> None:
    """LabError for an unknown name, an object that is no policy, or two policies that the rows could not tell apart;
    LabTypeError for what is not several."""
    if isinstance(policies, str) or not isinstance(policies, Iterable):
        one = repr(policies) if isinstance(policies, str) else ".."
        raise LabTypeError(
            f"policies is {came(policies)}; wanted several in a list, as in lab.simulate(trace, 24, [{one}])."
        )
    known: dict[str, object] = {}
    for policy in policies:
        if isinstance(policy, str) and policy not in (*POLICIES, *BOUNDS):
            raise unknown_policy(policy, (*POLICIES, *BOUNDS))
        bound = isinstance(policy, str) and policy in BOUNDS
        kind = policy if bound else type(policy_factory(policy)())
        name = policy_name(policy)
        if known.get(name) is kind:
            raise LabError(f"eviction policy {name!r} is named twice: its rows would be added up.")
        if name in known or (name in BOUNDS and not bound):
            raise LabError(f"two eviction policies are called {name!r}; give yours a `name` of its own.")
        known[name] = kind


def _table(
    requests: Sequence[Request], shares: Mapping[int, range], share: range, policy: AnyPolicy
) -> SlotTable | BypassTable | EndlessTable:
    if not isinstance(policy, str) or policy not in BOUNDS:
        return SlotTable(share, policy_factory(policy)())
    if policy == INFINITE:
        return EndlessTable()
    mine = [request.keys for request in requests if shares[request.layer] == share]
    return BypassTable(len(share), mine) if policy == BELADY_BYPASS else SlotTable(share, Belady(mine))


__all__ = ["BELADY", "AnyPolicy", "check_policies", "misses_of"]
