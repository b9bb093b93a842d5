"""Fault G13 on a CPU: more tokens than 65,535, where a grid's second and third axis stop."""

import pytest
import torch

from moe_lab.routing import Routing
from moe_lab_kernels.backend import record_launches
from tests.support.many_tokens import TOKENS, WIDTH, check, narrow_layer


@pytest.mark.parametrize("arm", ["gemv", "grouped", "auto"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_token_has_its_output(tokens: int, arm: str) -> None:
    check(tokens, arm)


@pytest.mark.parametrize("arm", ["gemv", "grouped"])
def test_grids_grow_along_their_first_axis(arm: str) -> None:
    """The launches that a GPU would get, written down here."""
    x = torch.zeros(TOKENS[-1], WIDTH, dtype=torch.bfloat16)
    ids = (torch.arange(len(x)) % 4)[:, None]
    with record_launches() as launched:
        narrow_layer()(x, arm, routing=Routing(ids, torch.ones(ids.shape)))
    grids = [launch.grid for launch in launched]
    assert max(grid[0] for grid in grids) > 512, "tokens are on some grid"
    assert all(size <= 65_535 for grid in grids for size in grid[1:]), grids
