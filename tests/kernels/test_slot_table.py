"""Chunks by arena slot and the header, from any plan: exactly the reference; what is not at hand computes nothing."""

import pytest
import torch

from moe_lab.errors import LabError, LabTypeError
from moe_lab_kernels import backend
from moe_lab_kernels.route import topk
from moe_lab_kernels.route.route_plan import unserved
from moe_lab_kernels.slots import route_table
from moe_lab_kernels.slots import slot_table as op
from tests.support.routing_cases import ROUTERS, picks, vectors

pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
E, WIDTH, SLOTS = 60, 64, 41


def tables(seed: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """slot_of [E] and owner [S]: two thirds of the experts at hand, by `kind` with entries that lie or lead outside."""
    g = torch.Generator().manual_seed(seed)
    experts, slots = torch.randperm(E, generator=g)[: SLOTS - 1], torch.randperm(SLOTS, generator=g)[: SLOTS - 1]
    slot_of, owner = torch.full((E,), -1, dtype=torch.int32), torch.full((SLOTS,), -1, dtype=torch.int32)
    slot_of[experts], owner[slots] = slots.int(), experts.int()
    if kind == "outside":
        slot_of[experts[:9]] = torch.tensor([SLOTS, SLOTS + 1, 2**31 - 1, -2, -(2**31), SLOTS, SLOTS, -7, SLOTS]).int()
    if kind == "stale":
        owner[slots[:9]] = owner[slots[:9]].roll(1)
    return slot_of, owner


def guarded(like: op.SlotTable) -> tuple[op.SlotTable, torch.Tensor]:
    """Outputs within one buffer of -7s, 8 of them around each."""
    sizes = [n for t in like for n in (8, t.numel())] + [8]
    room = torch.full((sum(sizes),), -7, dtype=torch.int32)
    parts = room.split(sizes)[1::2]
    return op.SlotTable(*(p.view(t.dtype).view(t.shape) for p, t in zip(parts, like, strict=True))), room


@pytest.mark.parametrize("everyone", [False, True], ids=["pairs", "and-everyone"])
@pytest.mark.parametrize(
    ("kind", "table"), [("uniform", "right"), ("one", "right"), ("skewed", "stale"), ("odd", "outside")]
)
@pytest.mark.parametrize(("t", "k"), [(1, 1), (1, 8), (7, 6), (8, 16)], ids=lambda v: str(v))
def test_kernel_is_the_reference(t: int, k: int, kind: str, table: str, everyone: bool) -> None:
    r = picks(t, k, E, WIDTH, kind=kind)
    affected = torch.arange(t, dtype=torch.int32) % 2
    for chunk_rows in (3, 8):
        given = (r.ids, r.weights, affected, *tables(t, table), chunk_rows)
        how = {"width": WIDTH, "everyone": everyone}
        want = op.slot_table_ref(*given, **how)
        out, room = guarded(want)
        op.slot_table(*given, **how, out=out)
        for name, made in zip(op.SlotTable._fields, out, strict=True):
            assert torch.equal(made, getattr(want, name)), f"{name}, chunks of {chunk_rows}"
        guards = room.split([n for t in want for n in (8, t.numel())] + [8])[::2]
        assert all((g == -7).all() for g in guards)


def test_chunks_spelled_out() -> None:
    ids = torch.tensor([[3, 1], [1, 5], [1, 9]], dtype=torch.int32)  # 5 is in no slot, 9 is a zero-computation expert
    weights = torch.arange(6.0).view(3, 2)
    slot_of = torch.tensor([0, 2, -1, 4, -1, -1], dtype=torch.int32)
    owner = torch.tensor([0, -1, 1, -1, 3], dtype=torch.int32)
    made = op.slot_table(ids, weights, torch.tensor(0, dtype=torch.int32), slot_of, owner, 2, width=10)
    assert made.chunks.tolist() == [[2, 0, 2], [2, 2, 1], [4, 3, 1], [-1, 4, 1], [-1, 0, 0], [-1, 0, 0]]
    assert made.row.tolist() == [1, 2, 4, 0, 3, 0]
    head = dict(zip(op.FIELDS, made.header.tolist(), strict=False))
    assert head == {"missing": 1, "outside": 0, "stale": 0, "invalid": 0, "affected": 0, "chunks": 4}
    about = made.header[len(op.FIELDS) :].view(4, 6)
    assert about[0].tolist() == [3, 1, 1, 5, 1, 9]
    assert torch.equal(about[1].view(torch.float32), weights.flatten())
    assert about[2].tolist() == [4, 2, 2, -1, 2, -1]
    assert about[3].tolist() == [op.FINE, op.FINE, op.FINE, op.MISSING, op.FINE, op.SKIPPED]


def test_no_tokens_launch_nothing() -> None:
    r = picks(0, 4, E, WIDTH, kind="uniform")
    with backend.count_launches() as count:
        made = op.slot_table(r.ids, r.weights, torch.tensor(0, dtype=torch.int32), *tables(0, "right"))
    assert count.launches == 0
    assert made.chunks.shape == (0, 3)
    assert made.header.tolist() == [0] * len(op.FIELDS)


REFUSALS = {
    "ids-int64": (lambda a: a.update(ids=a["ids"].long()), LabTypeError, "ids must be int32"),
    "flags-of-other-length": (
        lambda a: a.update(affected=torch.zeros(5, dtype=torch.int32)),
        LabError,
        r"affected must have shape \[3\]",
    ),
    "chunk-rows-0": (lambda a: a.update(chunk_rows=0), LabError, "chunk_rows=0"),
    "strided-ids": (lambda a: a.update(ids=a["ids"].t().contiguous().t()), LabError, "ids must be contiguous"),
    "no-slots": (lambda a: a.update(owner=a["owner"][:0]), LabError, "S=0 slots"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_before_a_launch(case: str) -> None:
    r = picks(3, 4, E, WIDTH, kind="uniform")
    slot_of, owner = tables(0, "right")
    zero = torch.tensor(0, dtype=torch.int32)
    given = {"ids": r.ids, "weights": r.weights, "affected": zero, "slot_of": slot_of, "owner": owner}
    change, error, message = REFUSALS[case]
    change(given)
    for form in (op.slot_table, op.slot_table_ref):
        with pytest.raises(error, match=message), backend.count_launches() as count:
            form(**given)
        assert count.launches == 0


@pytest.mark.parametrize(("t", "k"), [(9, 1), (1, 33)])
def test_more_pairs_than_a_program_takes(t: int, k: int) -> None:
    r = picks(t, k, E, WIDTH, kind="uniform")
    with pytest.raises(LabError, match=f"T={t} tokens of K={k} picks; at most 8 of 32 are served"):
        op.slot_table(r.ids, r.weights, torch.tensor(0, dtype=torch.int32), *tables(0, "right"))


def test_experts_are_counted_from_a_base() -> None:
    r, (slot_of, owner) = picks(7, 6, E, WIDTH, kind="uniform"), tables(7, "stale")
    zero = torch.tensor(0, dtype=torch.int32)
    want = op.slot_table_ref(r.ids, r.weights, zero, slot_of, owner, width=WIDTH)
    shifted = torch.where(owner < 0, owner, owner + 384)
    for form in (op.slot_table, op.slot_table_ref):
        made = form(r.ids, r.weights, zero, slot_of, shifted, width=WIDTH, base=384)
        assert all(torch.equal(m, w) for m, w in zip(made, want, strict=True))


FUSED = [(r, t) for r in ROUTERS for t in (1, 8)]


@pytest.mark.parametrize(("router", "t"), FUSED, ids=lambda v: f"T{v}" if isinstance(v, int) else v)
def test_one_launch_has_the_bits_of_two(router: str, t: int) -> None:
    spec = ROUTERS[router][0]
    g = torch.Generator().manual_seed(t)
    logits = torch.randn(t, spec.width, generator=g)
    logits[-1, 1] = float("nan")
    own = vectors(router)
    slot_of = torch.randperm(spec.num_experts, generator=g).int()
    owner = torch.argsort(slot_of).int()
    slot_of[: spec.num_experts // 3] = -1
    if unserved(logits, spec):
        with pytest.raises(LabError, match=r"topk.topk and slot_table.slot_table take it|does not serve"):
            route_table.route_table(logits, spec, slot_of, owner, **own)
        return
    ids, weights, affected = topk.topk(logits, spec, **own)
    want = op.slot_table(ids, weights, affected, slot_of, owner, 3, width=spec.width, everyone=True)
    made = route_table.route_table(logits, spec, slot_of, owner, 3, everyone=True, **own)
    assert torch.equal(made.ids, ids)
    assert torch.equal(made.weights.view(torch.int32), weights.view(torch.int32))
    for name, got, one in zip(op.SlotTable._fields, made.table, want, strict=True):
        assert torch.equal(got, one), name
    assert int(made.table.header[op.AFFECTED]) == 1
