"""For all tests: one torch thread, and a way past the annotation checks for tests of our own error messages."""

import os
import tempfile
from collections.abc import Generator

import pytest
import torch

# The tensors are small, and a second thread waits in barriers more than it works.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """What this machine's owner measured and tuned must not move a test: an own folder for each session."""
    folder = tempfile.TemporaryDirectory(prefix="moe-lab-cache-")
    os.environ["MOE_LAB_CACHE"] = folder.name
    config.add_cleanup(folder.cleanup)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Switches the checks off for a test marked `wrong_types`: it hands those over on purpose, to read our message."""
    if item.get_closest_marker("wrong_types") is None:
        return (yield)
    from jaxtyping import config

    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    try:
        return (yield)
    finally:
        config.update("jaxtyping_disable", before)
