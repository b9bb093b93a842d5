"""Fault G19: which kernels ran, and how each was cut, stands in a call's record and in what a benchmark keeps of it."""

from dataclasses import replace

import pytest
import torch

import moe_lab as lab
from moe_lab.arms import ARMS
from moe_lab.bench.check import Judge
from moe_lab.formats import quantize
from moe_lab_kernels import backend
from moe_lab_kernels.grouped.tiles import Tile
from tests.support.mmq_cases import mmq_case

D = 64


@pytest.fixture(scope="module")
def layer() -> lab.MoELayer:
    g = torch.Generator().manual_seed(2)
    parts = {n: quantize(torch.randn(2, D, D, generator=g) / 8, "q8_0") for n in ("gate", "up", "down")}
    spec = lab.MoESpec(lab.RouterSpec(2, 1), D, D)
    return lab.MoELayer.from_tensors(spec, router=torch.randn(2, D, generator=g), **parts)


def rows(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, D, generator=torch.Generator().manual_seed(tokens))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("tile", [Tile(16, 4, 1), Tile(32, 2, 3)], ids=str)
def test_the_tile_that_a_launcher_took_is_counted_with_it(tile: Tile) -> None:
    with backend.count_launches() as count:
        replace(mmq_case("q8_0-d4", 40, 64, [3]), tile=tile).product()
    (said,) = (part for part in count.tiles.split("; ") if part.startswith("mmq "))
    words = dict(word.split("=") for word in said.split()[1:])
    assert (words["format"], words["rows"], words["together"]) == ("q8_0", str(tile.rows), str(tile.group))
    assert (words["num_warps"], words["num_stages"]) == (str(tile.warps), str(tile.stages))
    assert words.get("maxnreg") == (None if tile.registers is None else str(tile.registers))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("arm", ["gemv", "mmq", "grouped"])
def test_a_call_records_each_kernels_tile(arm: str, layer: lab.MoELayer) -> None:
    with lab.record() as rec:
        y = layer(rows(3), arm)
    kernels = {part.split()[0] for part in y.timing.tiles.split("; ")}
    assert any(arm in kernel for kernel in kernels), kernels
    assert "format=q8_0" in y.timing.tiles
    assert rec.timings[["layout", "tiles"]].to_numpy().tolist() == [["raw", y.timing.tiles]]
    assert layer(rows(3), arm).timing.tiles == y.timing.tiles, "the same question, another tile"


@pytest.mark.usefixtures("interpreter")
def test_a_benchmarks_verdict_has_the_tiles_of_the_call_it_judged(layer: lab.MoELayer) -> None:
    x = rows(1)
    judge = Judge(layer, ARMS["gemv"], x, layer.route(x), lab.Options(), "bench/layer", 1)
    verdict = judge.check()
    assert verdict.reason is None
    assert verdict.tiles == layer(x, "gemv", routing=layer.route(x)).timing.tiles != ""
