"""Two runs' records side by side: which belong together, and which measure the same thing."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable

from moe_lab.runs.record import Record

Couple = tuple[list[Record], list[Record]]
"""Records of one key in A and in B; a fair comparison has one on each side."""


def key(record: Record) -> Hashable:
    """What makes two records one measurement: what, case, arms, format and metric."""
    return (record.what, record.case, record.arm, record.shared_arm, record.format, record.metric)


def first_of_each(records: Iterable[Record]) -> list[tuple[Record, int]]:
    """Each measurement's first record, and how many there are of it."""
    groups: dict[Hashable, list[Record]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return [(group[0], len(group)) for group in groups.values()]


def couples(a: Iterable[Record], b: Iterable[Record]) -> list[Couple]:
    """Every record of both runs once, in A's order, then B's. A record with no twin stands alone.

    What is left over on both sides but differs in the workload's name alone is put together too, so that the difference
    can be named.
    """
    met, alone = _join(a, b, key)
    left_a, left_b = ([r for couple in alone for r in couple[side]] for side in (0, 1))
    near, apart = _join(left_a, left_b, _key_without_workload)
    return [*met, *near, *apart]


def _join(
    a: Iterable[Record], b: Iterable[Record], by: Callable[[Record], Hashable]
) -> tuple[list[Couple], list[Couple]]:
    groups: dict[Hashable, Couple] = defaultdict(lambda: ([], []))
    for side, records in enumerate((a, b)):
        for record in records:
            groups[by(record)][side].append(record)
    return [c for c in groups.values() if all(c)], [c for c in groups.values() if not all(c)]


def _key_without_workload(record: Record) -> Hashable:
    case = record.case
    sizes = (*case.shape, case.tokens)
    return (record.what, case.model, sizes, case.state, record.arm, record.shared_arm, record.format, record.metric)


def unpaired(couple: Couple) -> str | None:
    """Why these records are no pair; None when there is one of each."""
    for side, other, records in (("A", "B", couple[0]), ("B", "A", couple[1])):
        if len(records) > 1:
            return f"{side} holds {len(records)} records of this measurement"
        if not records:
            return f"only in {other}"
    return None


def unlike(a: Record, b: Record) -> dict[str, str]:
    """{name: "name this against that"} for what makes two records of one key different measurements."""
    seen = {"workload": (a.case.workload, b.case.workload), "backend": (a.backend, b.backend), "unit": (a.unit, b.unit)}
    if a.spread and b.spread:
        seen["method"] = (a.method, b.method)
    return {name: f"{name} {left} against {right}" for name, (left, right) in seen.items() if left != right}
