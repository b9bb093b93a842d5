"""Fault G13 on a CPU: more tokens than 65,535, where a grid's second and third axis stop."""

import pytest

from tests.support.many_tokens import TOKENS, check


@pytest.mark.parametrize("arm", ["gemv", "grouped", "auto"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_token_has_its_output(tokens: int, arm: str) -> None:
    check(tokens, arm)
