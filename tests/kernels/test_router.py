"""The router's product: close to float64, and a row's bits its own whatever the batch or the form."""

import pytest
import torch

from moe_lab.errors import LabError, LabTypeError
from moe_lab.tolerances import tol
from moe_lab_kernels import backend
from moe_lab_kernels.route import router
from tests.support.kernel_cases import DTYPES, same_bits
from tests.support.routing_cases import guarded_outputs

pytestmark = pytest.mark.usefixtures("interpreter")


def inputs(t: int, d: int, r: int, x: str = "bf16", w: str = "bf16") -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(t + d)
    return torch.randn(t, d, generator=draw).to(DTYPES[x]), torch.randn(r, d, generator=draw).to(DTYPES[w])


def error(got: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """Largest |difference| over the sum of the magnitudes that were added."""
    size = x.double().abs() @ w.double().abs().T
    return float(((got - router.router_ref(x, w, bias)).double().abs() / size).max())


@pytest.mark.parametrize("w", DTYPES, ids="w-{}".format)
@pytest.mark.parametrize("x", DTYPES, ids="x-{}".format)
def test_close_to_float64(x: str, w: str) -> None:
    rows, weights = inputs(3, 300, 20, x, w)
    bias = torch.linspace(-2, 2, 20)
    got = router.router(rows, weights, bias)
    assert got.dtype == torch.float32
    assert error(got, rows, weights, bias) <= tol("router/product")


@pytest.mark.parametrize("t", [0, 1, 7, 8, 9, 37, 199], ids="T{}".format)
def test_any_number_of_rows(t: int) -> None:
    x, w = inputs(t, 96, 60)
    got = router.router(x, w)
    assert got.shape == (t, 60)
    assert not t or error(got, x, w) <= tol("router/product")


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_rows_bits_do_not_depend_on_the_batch_or_the_form(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole form, then the spread one with both its tiles; D = 600 has two whole segments and a part."""
    x, w = inputs(70, 600, 20, dtype, dtype)
    with monkeypatch.context() as patch:
        patch.setattr(router, "SPREAD_ROWS", 0)
        whole = router.router(x, w)
    for rows in (slice(0, 1), slice(33, 34), slice(3, 12), slice(0, 70)):
        assert same_bits(router.router(x[rows], w), whole[rows]), rows


def test_forms_and_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "SPREAD_ROWS", 9)
    for t, d, launches in ((1, 600, 2), (9, 600, 2), (10, 600, 1), (1, 256, 1), (0, 600, 0)):
        x, w = inputs(t, d, 8)
        with backend.count_launches() as count:
            router.router(x, w)
        assert count.launches == launches, (t, d)


def test_neighbours_and_strides_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = inputs(5, 300, 20)
    wide = torch.full((10, 600), float("nan"), dtype=x.dtype)
    wide[::2, ::2] = x
    strided = wide[::2, ::2]
    with guarded_outputs(monkeypatch):
        got = router.router(strided, w.T.contiguous().T)
    assert same_bits(got, router.router(x, w))
    x[1] = float("nan")
    broken = router.router(x, w)
    assert broken[1].isnan().all()
    assert same_bits(broken[[0, 2, 3, 4]], got[[0, 2, 3, 4]])


def test_tf32_would_show() -> None:
    """1 + 2^-12 has 13 significant bits; TF32 keeps 11."""
    x, w = torch.full((2, 16), 1 + 2.0**-12), torch.ones(3, 16)
    assert router.router(x, w).tolist() == [[16.00390625] * 3] * 2


def test_wrong_input_is_refused() -> None:
    x, w = inputs(2, 8, 4)
    with pytest.raises(LabError, match=r"w must have shape \[R, 8\], got \[4, 7\]"):
        router.router(x, w[:, :7])
    with pytest.raises(LabError, match=r"bias must have shape \[4\]"):
        router.router(x, w, torch.zeros(5))
    with pytest.raises(LabTypeError, match="x must be"):
        router.router(x.double(), w)
