"""The weighted sum: bits of the reference in every option, and the order of rounding spelled out."""

import pytest
import torch

from moe_lab.errors import LabError, LabTypeError
from moe_lab_kernels.rows import combine
from tests.support.kernel_cases import DTYPES, among_poison, same_bits

pytestmark = pytest.mark.usefixtures("interpreter")


def inputs(t: int, k: int, d: int, dtype: str = "f32") -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(t + k)
    return torch.randn(t, k, d, generator=draw).to(DTYPES[dtype]), torch.rand(t, k, generator=draw)


@pytest.mark.parametrize(("t", "k"), [(0, 6), (1, 6), (7, 6), (8, 6), (9, 1), (37, 6), (199, 2)])
def test_bits_of_the_reference(t: int, k: int) -> None:
    y, w = inputs(t, k, 60)
    got = combine.combine(y, w)
    assert got.shape == (t, 60)
    assert same_bits(got, combine.combine_ref(y, w))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out", DTYPES, ids="to-{}".format)
def test_every_option_at_once(dtype: str, out: str) -> None:
    y, w = inputs(9, 3, 704, dtype)
    draw = torch.Generator().manual_seed(1)
    options = {
        "shared": y[:, 1],
        "shared_gate": torch.rand(9, generator=draw),
        "out_dtype": DTYPES[out],
        "ids": torch.randint(-1, 3, (9, 3), generator=draw, dtype=torch.int32),
        "order": torch.rand(9, 3, generator=draw).argsort(1).int(),
    }
    assert same_bits(combine.combine(y, w, **options), combine.combine_ref(y, w, **options))


@pytest.mark.parametrize("d", [300, 100])
def test_r14_the_last_block_of_a_width_that_fills_none(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as on a GPU, outputs that are the row itself: 0.75 x in every element, rounded once."""
    monkeypatch.setattr(combine, "BLOCK_INTERPRETER", 256)
    x = torch.randn(3, d, generator=torch.Generator().manual_seed(d))
    got = combine.combine(x[:, None].expand(3, 2, d), torch.tensor([[0.25, 0.5]] * 3))
    assert same_bits(got, 0.75 * x)


def test_terms_are_rounded_products_added_in_rank_order() -> None:
    y = torch.tensor([[[1.0 + 2**-12], [-1.0]]])
    w = torch.tensor([[1.0 + 2**-12, 1.0 + 2**-11]])
    assert combine.combine(y, w).item() == 0.0, "a fused multiply-add would leave 2^-24"
    y = torch.tensor([[[2.0**24], [1.0], [-(2.0**24)]]])
    one = torch.ones(1, 3)
    assert combine.combine(y, one).item() == 0.0
    assert combine.combine(y, one, order=torch.tensor([[0, 2, 1]], dtype=torch.int32)).item() == 1.0


def test_a_skipped_slot_is_never_read() -> None:
    y, w = inputs(2, 3, 40)
    want = combine.combine(y[:, :2].contiguous(), w[:, :2].contiguous())
    y[:, 2], w[:, 2] = float("nan"), float("nan")
    ids = torch.tensor([[4, 1, -1], [0, 0, -1]], dtype=torch.int32)
    assert same_bits(combine.combine(y, w, ids=ids), want)
    nothing = torch.full((2, 3), -1, dtype=torch.int32)
    assert same_bits(combine.combine(y, w, ids=nothing), torch.zeros(2, 40))


def test_the_shared_expert_comes_last_and_is_rounded_with_the_rest() -> None:
    y, w = torch.full((1, 1, 8), 256.0).bfloat16(), torch.ones(1, 1)
    shared = torch.full((1, 8), 1.0).bfloat16()
    assert combine.combine(y, w, shared, out_dtype=torch.float32).unique().tolist() == [257.0]
    assert combine.combine(y, w, shared).unique().tolist() == [256.0]
    assert combine.combine(y, w, shared, torch.tensor([0.5]), out_dtype=torch.float32).unique().tolist() == [256.5]


def test_strides_and_neighbours_do_not_matter() -> None:
    y, w = inputs(7, 4, 96, "bf16")
    want = combine.combine(y, w)
    assert same_bits(combine.combine(y.permute(1, 2, 0).contiguous().permute(2, 0, 1), w.t().contiguous().t()), want)
    assert same_bits(combine.combine(among_poison(y, float("nan")), among_poison(w, float("nan"))), want)
    wide = torch.randn(7, 4, 192).bfloat16()
    wide[..., ::2] = y
    assert same_bits(combine.combine(wide[..., ::2], w), want)


def test_what_does_not_fit_is_refused() -> None:
    y, w = inputs(2, 3, 8)
    with pytest.raises(LabError, match=r"w must have shape \[2, 3\], got \[2, 4\]"):
        combine.combine(y, torch.zeros(2, 4))
    with pytest.raises(LabError, match="shared_gate was given without shared"):
        combine.combine(y, w, shared_gate=torch.ones(2))
    with pytest.raises(LabTypeError, match=r"ids must be int32, got torch\.int64"):
        combine.combine(y, w, ids=torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(LabTypeError, match="out_dtype"):
        combine.combine(y, w, out_dtype=torch.float64)
