"""These tests run the kernels in Triton's interpreter, which must be chosen before the kernels are imported.

`pytest tests/kernels` chooses it itself. In a run that also collects other folders the process is not ours to switch
(the lab would take the interpreter everywhere), so the tests that need it are skipped and say so.
"""

import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    asked = [Path(str(a).split("::")[0]).resolve() for a in config.args]
    only_here = all(path == FOLDER or FOLDER in path.parents for path in asked)
    if only_here and "moe_lab_kernels" not in sys.modules:
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def interpreter() -> None:
    """Skip where the kernels were imported without the interpreter."""
    from moe_lab_kernels import backend

    if not backend.INTERPRETED:
        pytest.skip("kernels are not interpreted in this run: start it as TRITON_INTERPRET=1 pytest tests/kernels")
