"""What the host does in a decode step: which kernels it starts, and how few torch operations stand between them."""

from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import moe_lab as lab
from moe_lab_kernels import backend
from tests.support.decode_layers import decode_layer, decode_rows


class Seen(TorchDispatchMode):
    """Counts torch operations that make or move values; views and empty buffers are free on a GPU."""

    FREE = ("empty", "new_empty", "view", "split", "select", "slice", "detach", "alias", "unbind", "as_strided")

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.__name__.split(".")[0]
        self.ops[name] += not name.startswith(self.FREE)
        return op(*args, **(kwargs or {}))


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a CPU are served as if by a GPU whose kernels do nothing."""

    def start(kernel, grid, *args, device, **meta) -> None:
        for count in backend._COUNTS.get():
            count.by_kernel[kernel.__name__] += 1

    monkeypatch.setattr(backend, "launch", start)
    monkeypatch.setattr(backend, "serve", lambda op, reference=None, /, **tensors: "cuda")
    for room in ("moe_lab.block", "moe_lab.execution.state", "moe_lab.routing.backend", "moe_lab.arms.gemv_float"):
        monkeypatch.setattr(f"{room}.backend_of", lambda tensor: "cuda")


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize(("shared", "launches"), [("main", 8), ("side", 8), ("fused", 6)])
@pytest.mark.parametrize("tokens", [1, 8])
def test_a_decode_step_starts_few_kernels_and_little_else(shared: str, launches: int, tokens: int) -> None:
    layer, x = decode_layer(), decode_rows(tokens)
    options = lab.Options(routing="device", shared=shared)
    layer(x, "gemv", options=options)  # what is made once for a shape stands ready
    with backend.count_launches() as count, Seen() as seen:
        layer(x, "gemv", options=options)
    assert count.launches == launches, count.by_kernel
    assert sum(seen.ops.values()) <= 2, {k: n for k, n in seen.ops.items() if n}
