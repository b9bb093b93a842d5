"""What a benchmark times on a GPU: a graph, wherever the arm can take its work from the device."""

import pytest
import torch

from moe_lab.arms import ARMS
from moe_lab.arms.by_rows import ByRows, Range
from moe_lab.bench.cell import Cell, case_of
from moe_lab.bench.clock import in_graph
from moe_lab.bench.watch import Watched
from moe_lab.bench.workloads import LayerShape
from tests.support.decode_layers import D, E, F, K, decode_layer, decode_rows


def cell(tokens: int) -> Cell:
    layer, x = decode_layer(), decode_rows(tokens)
    shape = LayerShape("decode", D, F, E, K)
    return Cell(layer, x[None], [layer.route(x)], case_of(shape, "uniform", tokens))


@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_the_bench_times_graphs_of_every_arm_that_can_go_without_the_host(tokens: int) -> None:
    mixed = ByRows("mixed", (Range(2, ARMS["gemv"]), Range(None, ARMS["reference"])))
    for name in ("gemv", "grouped", "mmq", "mmq_folded", "gemv_mmq"):
        assert in_graph(cell(tokens), ARMS[name]).routing == "device", name
    for arm in (ARMS["reference"], ARMS["per_token"], mixed):
        assert in_graph(cell(tokens), arm).routing == "host", arm.name


def test_what_an_arm_has_not_its_watched_twin_has_not() -> None:
    x = decode_rows(1)
    for arm in (ARMS["table"], ARMS["per_token"]):
        seen = Watched(arm)
        assert not hasattr(seen, "experts_of_plan")
        assert torch.equal(decode_layer()(x, seen).out, decode_layer()(x, arm).out)
        assert not seen.problems
