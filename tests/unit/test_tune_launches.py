"""The launch tuner: a tile enters the table when it is right and clearly quicker, by a clock that the test holds."""

import pickle
from concurrent.futures import Executor, Future
from dataclasses import replace

import pytest
import torch

from moe_lab.bench import tune_launches as tune_module
from moe_lab.bench.launches import Job, jobs
from moe_lab.bench.tune_launches import Started, asked, best, measured, started, tune_launches
from moe_lab.bench.workloads import LayerShape
from moe_lab.errors import LabError
from moe_lab_kernels.backend import record_launches
from moe_lab_kernels.grouped.tiles import Tile
from moe_lab_kernels.launch.ahead import job_of
from moe_lab_kernels.launch.schema import KERNELS

BUILT_IN, OTHER, THIRD = Tile(64, 4, 3), Tile(128, 8, 3), Tile(128, 4, 2)
OUT = torch.zeros(4)


class OutOfResources(Exception):
    """As Triton's: shared memory."""


def job(*others: Tile, wrong: Tile | None = None, unfit: Tile | None = None, fault: Tile | None = None) -> Job:
    """Two calls that write 1 and 2 into one buffer, whichever the tile."""

    def call(value: float):
        def run(tile: Tile | None) -> torch.Tensor:
            if tile is not None and tile == unfit:
                raise OutOfResources
            if tile is not None and tile == fault:
                raise RuntimeError("illegal memory access")
            return OUT.fill_(value + (tile is not None and tile == wrong and value == 2))

        return run

    return Job("grouped", "q2_k", 16, True, 768, 2048, BUILT_IN, others, (call(1), call(2)))


def clock_of(times: dict[Tile, float], timed: list[Tile] | None = None):
    """A clock that knows how long each tile takes."""

    def clock(calls) -> float:
        (tile,) = {call.args[0] for call in calls}
        if timed is not None:
            timed.append(tile)
        return times[tile]

    return clock


@pytest.mark.parametrize(
    ("times", "won", "us"),
    [
        ({BUILT_IN: 10.0, OTHER: 8.0, THIRD: 9.0}, OTHER, 8.0),
        ({BUILT_IN: 10.0, OTHER: 9.8, THIRD: 10.0}, BUILT_IN, 10.0),
        ({BUILT_IN: 10.0, OTHER: 9.0, THIRD: 9.0}, OTHER, 9.0),
        ({BUILT_IN: 10.0, OTHER: 12.0, THIRD: 11.0}, BUILT_IN, 10.0),
    ],
    ids=["quickest", "within 3 % stays", "first of equals", "slower"],
)
def test_a_clearly_quicker_tile_wins(times: dict[Tile, float], won: Tile, us: float) -> None:
    found = best(job(OTHER, THIRD), clock_of(times))
    assert found.cut == ({} if won is BUILT_IN else {name: getattr(won, name) for name in KERNELS["grouped"]})
    assert (found.us, found.default_us) == (us, 10.0)
    assert (found.kernel, found.format, found.tokens, found.gated, found.n, found.kd) == (
        "grouped", "q2_k", 16, True, 768, 2048)  # fmt: skip


def test_a_tile_with_other_bits_is_said_and_never_timed() -> None:
    timed: list[Tile] = []
    with pytest.warns(UserWarning, match="other bits"):
        found = best(job(OTHER, THIRD, wrong=OTHER), clock_of({BUILT_IN: 10.0, THIRD: 9.0}, timed))
    assert (timed, found.us) == ([BUILT_IN, THIRD], 9.0)


def test_a_tile_that_does_not_fit_is_left_out_silently() -> None:
    assert best(job(OTHER, unfit=OTHER), clock_of({BUILT_IN: 10.0})).us == 10.0


def test_any_other_failure_is_raised() -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        best(job(OTHER, fault=OTHER), clock_of({BUILT_IN: 10.0}))


def test_jobs_after_the_budget_are_named_and_left_out() -> None:
    some = [(job(), {}), (replace(job(), format="q3_k"), {})]
    with pytest.warns(UserWarning, match="left out grouped q2_k gate \\+ up"):
        assert [*measured(some[:1], clock_of({BUILT_IN: 10.0}), until=0.0)] == []
    assert len([*measured(some, clock_of({BUILT_IN: 10.0}), until=1e300)]) == 2


class Compilers(Executor):
    """An executor that never gets to the last tile it was given."""

    def __init__(self) -> None:
        self.given: list[Future] = []

    def submit(self, fn, /, *args, **kwargs) -> Future:
        if self.given:
            self.given[-1].set_result([])
        self.given.append(Future())
        return self.given[-1]


def test_tiles_that_are_not_compiled_in_time_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module, "wait", lambda futures, timeout: None)
    timed: list[Tile] = []
    with pytest.warns(UserWarning, match="left out 1 tiles of grouped q2_k"):
        (found,) = measured(sent(job(OTHER, THIRD)), clock_of({BUILT_IN: 10.0, OTHER: 9.0}, timed), 1e300)
    assert timed == [BUILT_IN, OTHER]
    assert found.us == 9.0
    with pytest.warns(UserWarning, match="left out grouped q2_k gate"):
        assert [*measured(sent(job()), clock_of({}), 1e300)] == []


def sent(some: Job) -> list[Started]:
    return [(some, started(some, Compilers()))]


def test_an_unknown_kernel_is_named() -> None:
    with pytest.raises(LabError, match="no launch table has a kernel 'gemm'; known: grouped"):
        tune_launches(kernels=["gemm"])


def test_shapes_meet_the_formats_that_fit_them() -> None:
    assert [(s.name, f) for s, f in asked(["gpt-oss-120b-like", "lab-42m"], ["q2_k", "bf16"])] == [
        ("gpt-oss-120b-like", "bf16"), ("lab-42m", "q2_k"), ("lab-42m", "bf16")]  # fmt: skip
    with pytest.raises(LabError, match="no workload is called 'gpt'"):
        asked(["gpt"], None)


def test_off_cuda_there_is_nothing_to_tune() -> None:
    with pytest.raises(LabError, match="of a CUDA device"):
        tune_launches("cpu")


TINY = LayerShape("tiny", 256, 512, 3, 2)
PLACES = {
    "q2_k+q3_k": {("grouped", "q2_k", True), ("grouped", "q3_k", False), ("mmq", "q2_k", True), ("mmq", "q2_k", False),
                  ("mmq", "q3_k", False), ("wide", "q2_k", False), ("wide", "q3_k", False)},
    "fp8_block": {("grouped", "fp8_block", True), ("grouped", "fp8_block", False), ("grouped_fp8", "fp8_block", False),
                  ("grouped_fp8_hidden", "fp8_block", True), ("grouped_fp8", "fp8_block", True)},
    "bf16": {("grouped", "bf16", True), ("grouped", "bf16", False)},
}  # fmt: skip


@pytest.mark.parametrize("format", PLACES)
def test_every_product_of_a_layer_is_tuned_at_every_width(format: str) -> None:
    with record_launches():
        made = list(jobs(TINY, format, "cpu"))
    assert {(j.kernel, j.format, j.gated) for j in made} == PLACES[format]
    assert {j.tokens for j in made} == {16, 32, 64, 128}
    assert all(j.tokens <= 64 for j in made if j.kernel.startswith("grouped_fp8")), "the arm's widest"
    assert {(j.n, j.kd) for j in made if j.gated} == {(512, 256)}
    assert all(job.others and job.default not in job.others for job in made)
    assert all(len(job.others) <= 14 for job in made), "a bounded number of tiles"


def test_jobs_of_one_kernel_alone() -> None:
    with record_launches():
        made = list(jobs(TINY, "fp8_block", "cpu", ["grouped_fp8"]))
    assert [(j.tokens, j.gated) for j in made] == [(16, False), (32, False), (64, True), (64, False)]


@pytest.mark.parametrize("format", PLACES)
def test_a_job_launches_its_kernel_as_the_tile_says(format: str) -> None:
    with record_launches():
        made = list(jobs(TINY, format, "cpu"))
    for job in made:
        for tile in (job.default, job.others[-1]):
            with record_launches() as launched:
                job.calls[0](tile)
            product = launched[-1]
            assert job.kernel.split("_")[0] in product.kernel.__name__ or job.kernel == "wide"
            assert (product.meta["num_warps"], product.meta["num_stages"]) == (tile.warps, tile.stages), job.label
            assert tile.rows in job_of(product).args
            assert pickle.loads(pickle.dumps(job_of(product))) == job_of(product)
