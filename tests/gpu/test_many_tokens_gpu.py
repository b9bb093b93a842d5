"""Fault G13 on a GPU: more tokens than 65,535, where a grid's second and third axis stop."""

import pytest
import torch

from tests.support.many_tokens import TOKENS, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none"),
]


@pytest.mark.parametrize("arm", ["gemv", "grouped", "auto"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_token_has_its_output(tokens: int, arm: str) -> None:
    check(tokens, arm, "cuda")
