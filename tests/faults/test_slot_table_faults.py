"""Experts found through a slot table: missing, outside the arena, out of date. Never another expert's weights."""

import functools

import pytest
import torch

import moe_lab as lab
from moe_lab.arms import ExpertStack
from moe_lab.errors import LabError, LabTypeError
from moe_lab.layer import MoELayer
from moe_lab.routing import Routing
from moe_lab.stream.device_table import DeviceTable
from moe_lab.stream.table_experts import TableExperts
from tests.support.decode_layers import E, K, decode_layer, decode_rows, taken

layer = functools.cache(decode_layer)
PARTS = ("gate", "up", "down")
HOLDS = [5, 0, 9, 3, 14, 2, 7]  # the experts of an arena's slots 0..6
WAYS = {
    "host": lab.Options(),
    "device": lab.Options(routing="device"),
    "fused": lab.Options(routing="device", shared="fused"),
}


def by_table(fetch=None) -> MoELayer:
    stack = layer().experts.stack
    arena = ExpertStack(*(taken(stack.part(name), torch.tensor(HOLDS)) for name in PARTS), {})
    table = DeviceTable.of({e: s for s, e in enumerate(HOLDS)}, E, len(HOLDS), torch.device("cpu"))
    return MoELayer(layer().spec, layer().router_weights, TableExperts(arena, table, fetch), layer().shared)


def picks(*ids: int) -> Routing:
    ranked = torch.tensor(ids).view(-1, K)
    return Routing(ranked, torch.rand(ranked.shape, generator=torch.Generator().manual_seed(1)))


HELD = picks(9, 5, 2, 14, 7, 0, 3, 5)


@pytest.mark.parametrize("way", WAYS)
def test_what_the_table_finds_has_the_bits_of_resident(way: str) -> None:
    x = decode_rows(2)
    got = by_table()(x, "gemv", routing=HELD, options=WAYS[way])
    assert torch.equal(got.out, layer()(x, "gemv", routing=HELD).out)
    if way != "host":
        assert (got.timing.hits, got.timing.misses) == (7, 0)


def spoil(own: MoELayer, case: str) -> None:
    """Slot 3 holds expert 3; what goes wrong with it."""
    table = own.experts.table
    if case == "missing":
        table.slot_of[3] = -1
    elif case == "outside":
        table.slot_of[3] = 7
    elif case == "far outside":
        table.slot_of[3] = 2**31 - 1
    elif case == "below":
        table.slot_of[3] = -(2**31)
    elif case == "overwritten":  # a slot changed hands, the other end was forgotten
        table.owner[3] = 11
    else:
        table.owner[3] = -1


SAYS = {
    "missing": "is in no slot of the arena",
    "below": "is in no slot of the arena",
    "outside": r"to slot 7, but the arena has S=7 slots",
    "far outside": r"to slot 2147483647, but the arena has S=7 slots",
    "overwritten": r"out of date: it sends expert 3.* to slot 3, which holds 11",
    "emptied": r"out of date: it sends expert 3.* to slot 3, which holds -1",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", SAYS)
def test_an_expert_that_is_not_there_is_named(case: str, way: str) -> None:
    own, x = by_table(), decode_rows(2)
    spoil(own, case)
    where = "" if way == "host" else r" \(token 1, slot 2\)"
    with pytest.raises(LabError, match=SAYS[case]) as error:
        own(x, "gemv", routing=HELD, options=WAYS[way])
    assert "expert 3" in str(error.value)
    if where:
        assert "(token 1, slot 2)" in str(error.value)
    others = picks(9, 5, 2, 14)  # picks that do not need it are served as before
    assert torch.equal(own(x[:1], "gemv", routing=others, options=WAYS[way]).out,
                       layer()(x[:1], "gemv", routing=others).out)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["missing", "overwritten", "outside"])
def test_what_is_missing_is_fetched_and_the_table_mended(case: str, way: str) -> None:
    asked: list[list[int]] = []

    def fetch(experts) -> int:
        asked.append(list(experts))
        table, stack = own.experts.table, layer().experts.stack
        for expert, slot in zip(experts, (3, 1), strict=False):
            table.slot_of[int(table.owner[slot])] = -1
            table.slot_of[expert], table.owner[slot] = slot, expert
            for name in PARTS:
                own.experts.stack.part(name).data[slot].copy_(stack.part(name).data[expert])
        return 1000 * len(experts)

    own, x = by_table(fetch), decode_rows(1)
    spoil(own, case)
    wanted = picks(9, 11, 2, 3)
    got = own(x, "gemv", routing=wanted, options=WAYS[way])
    assert asked == [[3, 11]]
    assert torch.equal(got.out, layer()(x, "gemv", routing=wanted).out)
    assert (got.timing.misses, got.timing.bytes_read) == (2, 2000)
    again = own(x, "gemv", routing=wanted, options=WAYS[way])
    assert asked == [[3, 11]]
    assert again.timing.misses == 0


def test_a_fetch_that_does_not_bring_the_expert_is_an_error() -> None:
    own = by_table(lambda experts: 0)
    for options in WAYS.values():
        with pytest.raises(LabError, match=r"expert 11.* is in no slot of the arena"):
            own(decode_rows(1), "gemv", routing=picks(9, 11, 2, 3), options=options)


def test_impossible_ids_compute_nothing() -> None:
    with pytest.raises(LabError, match=r"routing.ids\[0, 1\] is 16"):  # on a CPU the host looks
        by_table()(decode_rows(1), "gemv", routing=picks(9, E, 2, 5), options=WAYS["device"])
    skipped = picks(9, -1, 2, 5)
    got = by_table()(decode_rows(1), "gemv", routing=skipped, options=WAYS["device"])
    assert torch.equal(got.out, layer()(decode_rows(1), "gemv", routing=skipped).out)


def test_no_tokens_ask_for_nothing() -> None:
    own = by_table(lambda experts: pytest.fail("fetched"))
    for options in WAYS.values():
        y = own(decode_rows(0), "gemv", options=options)
        assert y.out.shape == (0, layer().spec.d_model)
        assert (y.timing.hits, y.timing.misses, y.timing.submissions) == (0, 0, 0)


def test_tables_that_cannot_be() -> None:
    good = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(LabTypeError, match=r"DeviceTable.owner is torch.int64; wanted int32"):
        DeviceTable(good, good.long())
    with pytest.raises(LabError, match=r"slot_of has shape \[2, 2\]"):
        DeviceTable(good.view(2, 2), good)
    with pytest.raises(LabError, match="a contiguous vector"):
        DeviceTable(torch.zeros(8, dtype=torch.int32)[::2], good)
    with pytest.raises(LabError, match="speaks of S=4 slots, the arena holds S=16"):
        TableExperts(layer().experts.stack, DeviceTable(good, good))
    with pytest.raises(LabError, match="lives on meta but the arena on cpu"):
        TableExperts(layer().experts.stack, DeviceTable.identity(E, torch.device("meta")))


def test_a_streamed_layers_shared_expert_is_not_fused() -> None:
    model = lab.sample()
    with lab.ExpertCache(slots=4) as cache:
        streamed = lab.open(model).layer(3, cache=cache)
        x = torch.randn(2, streamed.spec.d_model)
        with pytest.raises(LabError, match="shared='fused' cannot be: streamed experts come in waves"):
            streamed(x, "gemv", options=lab.Options(shared="fused"))
        resident = lab.open(model).layer(3)
        side = streamed(x, "gemv", options=lab.Options(shared="side")).out
        assert torch.equal(side, resident(x, "gemv").out)
