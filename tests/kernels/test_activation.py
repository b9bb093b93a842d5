"""Gated activations against float64, clamps included."""

import pytest
import torch

from moe_lab.errors import LabError, LabTypeError
from moe_lab.tolerances import tol
from moe_lab_kernels.rows import activation
from tests.support.kernel_cases import DTYPES, worst_relative

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy under the interpreter: exp(100)
]
OPS = ("swiglu", "geglu")


def inputs(p: int, f: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(p)
    gate, up = (4 * torch.randn(p, f, generator=draw).to(DTYPES[dtype]) for _ in range(2))
    return gate, up


def exact(op: str, gate: torch.Tensor, up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    g, u = gate.double(), up.double()
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    z = g if op == "swiglu" else 1.5957691216057308 * (g + 0.044715 * g**3)
    return (g / (1 + torch.exp(-z)) * u).to(gate.dtype)


@pytest.mark.parametrize(("op", "p"), [*(("swiglu", p) for p in (0, 1, 7, 8, 9, 37, 199)), ("geglu", 0), ("geglu", 9)])
def test_near_float64(op: str, p: int) -> None:
    gate, up = inputs(p, 60, "f32")
    got, ref = getattr(activation, op)(gate, up), getattr(activation, f"{op}_ref")(gate, up)
    assert got.shape == (p, 60)
    if p:
        assert worst_relative(got, exact(op, gate, up)) <= tol("activation/f32")
        assert worst_relative(ref, exact(op, gate, up)) <= tol("activation/f32")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [None, 1.5], ids=["free", "limit1.5"])
def test_dtypes_and_limits(op: str, dtype: str, limit: float | None) -> None:
    gate, up = inputs(9, 1408, dtype)
    got = getattr(activation, op)(gate, up, limit=limit)
    assert got.dtype == gate.dtype
    assert worst_relative(got, exact(op, gate, up, limit)) <= tol(f"activation/{dtype}")


def test_the_limit_is_one_sided_on_the_gate_and_two_sided_on_up() -> None:
    gate, up = torch.tensor([[-50.0, 50.0, 1.0, 1.0]]), torch.tensor([[1.0, 1.0, 50.0, -50.0]])
    got = activation.swiglu(gate, up, limit=10.0)
    assert got[0, 0].abs() < 1e-18, "a gate of -50 must not be clamped to -10"
    assert torch.allclose(got[0, 1:], torch.tensor([9.99954602, 7.31058579, -7.31058579]))


@pytest.mark.parametrize("op", OPS)
def test_nan_passes_through_a_limit(op: str) -> None:
    gate, up = inputs(1, 32, "f32")
    gate[0, 3], up[0, 5] = float("nan"), float("nan")
    got = getattr(activation, op)(gate, up, limit=2.0)
    assert got.isnan().nonzero().tolist() == [[0, 3], [0, 5]]


@pytest.mark.parametrize("op", OPS)
def test_strides_do_not_matter(op: str) -> None:
    gate, up = inputs(8, 128, "bf16")
    run = getattr(activation, op)
    for a, b in (
        (gate[:, :64], up[:, 64:]),
        (gate[:, ::2], up[:, 1::2]),
        (gate[:1].expand(8, 128), up.t().contiguous().t()),
    ):
        assert torch.equal(run(a, b), run(a.contiguous(), b.contiguous()))


def test_what_does_not_fit_is_refused() -> None:
    gate = torch.zeros(2, 8)
    with pytest.raises(LabError, match=r"up must have shape \[2, 8\], got \[2, 9\]"):
        activation.swiglu(gate, torch.zeros(2, 9))
    with pytest.raises(LabTypeError, match="up must be fp32, got"):
        activation.swiglu(gate, gate.bfloat16())
    with pytest.raises(LabError, match="limit=0"):
        activation.geglu(gate, gate, limit=0)
