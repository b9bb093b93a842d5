"""Fault table, rows G01, G02, G04, G17 and G20 where torch computes."""

from collections.abc import Callable

import pytest

from tests.support.group_faults import ARMS, FAULTS


@pytest.mark.parametrize(("arm", "format"), ARMS, ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault(fault: Callable[[str, str, str], None], arm: str, format: str) -> None:
    fault(arm, format, "cpu")
