"""Device code shared by the kernels: 64-bit offsets, bf16, exact dots, byte dot products."""

import numpy as np
import pytest
import torch

from moe_lab_kernels import backend, primitives
from moe_lab_kernels.backend import jit, tl
from tests.support.kernel_cases import DTYPES, bits

pytestmark = pytest.mark.usefixtures("interpreter")


@jit
def _offset_kernel(index, stride, out):
    tl.store(out, primitives.offset64(tl.load(index), stride))


@jit
def _dot_kernel(a, b, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    left, right = tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], primitives.dot(left, right))


@jit
def _cast_kernel(x, wide, back, N: tl.constexpr):
    i = tl.arange(0, N)
    v = primitives.to_f32(tl.load(x + i))
    tl.store(wide + i, v)
    tl.store(back + i, primitives.round_to(v, back.dtype.element_ty))


@jit
def _bytes_kernel(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    va, vb = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, primitives.dp4a(va, vb, i, False))
    tl.store(out + N + i, primitives.add4(va, 0, False))
    tl.store(out + 2 * N + i, primitives.dp2a(va, vb, False, False))
    tl.store(out + 3 * N + i, primitives.dp2a(va, vb, True, False))


def launch(kernel, *args: object) -> None:
    backend.launch(kernel, (1,), *args, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("index", "stride"),
    [(8, 2**28), (1_079_839, 2048), (511, 14336 * 5376), (-1, 2048)],
    ids=["expert-8", "row-1079839", "last-slot", "negative"],
)
def test_offsets_are_64_bits_wide(index: int, stride: int) -> None:
    out = torch.zeros(1, dtype=torch.int64)
    launch(_offset_kernel, torch.tensor([index], dtype=torch.int32), stride, out)
    assert out.item() == index * stride


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_dot_of_small_integers_is_exact(dtype: str) -> None:
    a, b = (
        torch.randint(-2, 3, (16, 16), generator=torch.Generator().manual_seed(s)).to(DTYPES[dtype]) for s in (0, 1)
    )
    out = torch.full((16, 16), float("nan"))
    launch(_dot_kernel, a, b, out, 16, 16, 16)
    assert torch.equal(out, a.float() @ b.float())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_dot_of_fp8_is_exact(dtype: torch.dtype) -> None:
    a, b = (torch.randint(-2, 3, (16, 16), generator=torch.Generator().manual_seed(s)).to(dtype) for s in (0, 1))
    out = torch.full((16, 16), float("nan"))
    launch(_dot_kernel, a, b, out, 16, 16, 16)
    assert torch.equal(out, a.float() @ b.float())


def test_dot_does_not_fall_to_tf32() -> None:
    out = torch.zeros(16, 16)
    launch(_dot_kernel, torch.full((16, 16), 1 + 2**-12), torch.ones(16, 16), out, 16, 16, 16)
    assert out[0, 0].item() == 16.00390625


def test_bf16_is_widened_and_rounded_like_torch() -> None:
    special = [0.0, -0.0, 1.0, 2.5, float("inf"), -float("inf"), float("nan"), 3.3895e38, 1e-40, 9.2e-41]
    x = torch.cat([torch.tensor(special), torch.randn(54, generator=torch.Generator().manual_seed(0))])
    wide, back = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    launch(_cast_kernel, x.bfloat16(), wide, back, 64)
    assert torch.equal(bits(wide), bits(x.bfloat16().float()))
    launch(_cast_kernel, x, wide, back, 64)
    assert torch.equal(bits(back), bits(x.bfloat16()))
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-8 + 2**-20] * 16)
    launch(_cast_kernel, ties, wide, back, 64)
    assert torch.equal(bits(back), bits(ties.bfloat16()))


def test_the_plain_twins_of_the_byte_dot_products() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-(2**31), 2**31, (64,), generator=draw, dtype=torch.int64).int() for _ in range(2))
    a[:2], b[:2] = -(2**31) + 0x808080, 0x7F7F7F7F
    out = torch.zeros(4, 64, dtype=torch.int32)
    launch(_bytes_kernel, a, b, out, 64)
    i8 = [t.numpy().view(np.int8).reshape(64, 4).astype(int) for t in (a, b)]
    half = a.numpy().view(np.int16).reshape(64, 2).astype(int)
    want = [
        (i8[0] * i8[1]).sum(1) + np.arange(64),
        i8[0].sum(1),
        (half * i8[1][:, :2]).sum(1),
        (half * i8[1][:, 2:]).sum(1),
    ]
    assert np.array_equal(out.numpy(), np.array(want))


@jit
def _fold_kernel(x, out, A: tl.constexpr, B: tl.constexpr, LANES: tl.constexpr):
    a, lane = tl.arange(0, A)[:, None, None], tl.arange(0, 32)[None, None, :]
    v = tl.load(x + (a * B + tl.arange(0, B)[None, :, None]) * 32 + lane)
    row, first = primitives.folded_row(B, LANES)
    each: tl.constexpr = 32 // LANES
    to = out + (a * B + row) * each + lane // LANES
    tl.store(to, primitives.fold_rows(v, A, B, LANES), mask=first & (a >= 0))


@pytest.mark.parametrize("lanes", [4, 16, 32], ids="{}-lanes".format)
@pytest.mark.parametrize("b", [1, 2, 8, 64], ids="{}-rows".format)
def test_folded_rows_have_the_sums_of_halves_against_halves(b: int, lanes: int) -> None:
    draw = torch.Generator().manual_seed(b)
    x = torch.randn(2, b, 32, generator=draw) * 10.0 ** torch.randint(-4, 5, (2, b, 32), generator=draw)
    out, want = torch.full((2, b, 32 // lanes), float("nan")), x.view(2, b, 32 // lanes, lanes)
    launch(_fold_kernel, x, out, 2, b, lanes)
    while want.shape[-1] > 1:
        half = want.shape[-1] // 2
        want = want[..., :half] + want[..., half:]
    assert torch.equal(bits(out), bits(want.squeeze(-1)))
