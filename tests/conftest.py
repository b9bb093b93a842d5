"""For all tests: one torch thread, and a way past the annotation checks for tests of our own error messages."""

from collections.abc import Generator

import pytest
import torch

# The tensors are small, and a second thread waits in barriers more than it works.
torch.set_num_threads(1)


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
