"""Launch tables on a GPU: what the tuner measures is right and fits, and a launcher takes what a table says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_lab.bench import launches
from moe_lab.bench.tune_launches import best, gpu_clock
from moe_lab.bench.workloads import LayerShape
from moe_lab_kernels.backend import record_launches
from moe_lab_kernels.launch import table
from moe_lab_kernels.launch.table import Entry, own_path, write_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TINY = LayerShape("tiny", 512, 768, 8, 2)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[launches.Job]:
    """Products in q2_k and q3_k, in tiles of 16."""
    monkeypatch.setattr(launches, "ROWS", {16: 2})
    monkeypatch.setattr(launches, "WIDE_ROWS", 192)
    return list(launches.jobs(TINY, "q2_k+q3_k", "cuda"))


def test_the_tuner_times_tiles_whose_bits_agree(jobs: list[launches.Job], recwarn: pytest.WarningsRecorder) -> None:
    for job in (j for j in jobs if j.kernel == "grouped"):  # mmq compiles for half a minute
        found = best(replace(job, others=job.others[:1]), gpu_clock)
        assert 0 < found.us <= found.default_us
    assert not [w for w in recwarn if "other bits" in str(w.message)]


def test_a_launcher_takes_the_tile_of_the_users_table(
    jobs: list[launches.Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOE_LAB_CACHE", str(tmp_path))
    name, job = torch.cuda.get_device_name(), next(j for j in jobs if j.kernel == "grouped" and not j.gated)
    want = job.calls[0](job.default).clone()
    one = Entry("grouped", job.format, 16, False, job.n, job.kd, {"rows": 64, "warps": 4, "stages": 4}, 1.0, 1.0)
    table.forget()
    try:
        write_table(own_path(name), name, [one], {})
        with record_launches() as made:
            job.calls[0](None)
        assert (made[-1].meta["num_warps"], made[-1].meta["num_stages"]) == (4, 4)
        assert torch.equal(job.calls[0](None), want)
    finally:
        monkeypatch.undo()
        table.forget()
