"""Fault table, rows G01, G02, G04, G17 and G20 on a GPU; no tokens also while a graph is captured."""

from collections.abc import Callable

import pytest
import torch

from tests.support.group_faults import ARMS, FAULTS, layer, rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none"),
]


@pytest.mark.parametrize(("arm", "format"), ARMS, ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault(fault: Callable[[str, str, str], None], arm: str, format: str) -> None:
    fault(arm, format, "cuda")


@pytest.mark.parametrize(("arm", "format"), ARMS, ids=str)
def test_no_tokens_while_a_graph_is_captured(arm: str, format: str) -> None:
    own, x = layer(4, 2, 64, 64, format, "cuda"), rows(0, 64, "cuda")
    own(x, arm)
    graph, other = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        out = own(x, arm).out
        other += 1  # an empty graph could not be replayed
    graph.replay()
    assert out.shape == (0, 64)
    assert other.unique().numel() == 1
