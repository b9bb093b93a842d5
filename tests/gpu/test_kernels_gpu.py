"""The compiled kernels on a GPU: the bits of their torch references, whatever the batch, the tile or the strides."""

from dataclasses import replace

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab.tolerances import tol
from moe_lab_kernels import backend, primitives
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.gemv import gemv
from moe_lab_kernels.rows import activation, combine, quantize_rows
from tests.support.kernel_cases import DTYPES, alone, gemv_case, nmse, same_bits, worst_relative

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none"),
]
FORMATS = ("q2_k", "q3_k", "q8_0")


@jit
def _dot_kernel(a, b, out):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    tl.store(out + at, primitives.dot(tl.load(a + at), tl.load(b + at)))


COUNTS = {
    "T1": [1],
    "T7-one-chunk": [7],
    "T8-full": [8],
    "T9": [8, 1],
    "T37-skewed": [8, 8, 8, 8, 5],
    "one-to-eight": [1, 2, 3, 4, 5, 6, 7, 8],
    "empty-expert": [3, 0, 5, 0],
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(
    ("n", "kd"), [(60, 256), (704, 2048), (1408, 2304)], ids=["N60-K256", "N704-K2048", "N1408-K2304"]
)
def test_gemv_has_the_bits_of_its_reference(format, counts, n, kd) -> None:
    case = gemv_case(format, n, kd, counts, device="cuda")
    got, want = case.run(), case.run(gemv.gemv_ref)
    assert same_bits(got.view, want.view)
    assert got.intact()
    assert nmse(got.view.cpu(), case.exact()) <= tol("gemv/emulation")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gemv_stores_round_once(format, dtype) -> None:
    case = gemv_case(format, 100, 512, [8, 3], dtype=dtype, device="cuda")
    assert same_bits(case.run().view, case.run(gemv.gemv_ref).view)


@pytest.mark.parametrize("format", FORMATS)
def test_a_rows_bits_do_not_depend_on_its_chunk_or_tile(format) -> None:
    case = gemv_case(format, 130, 1024, [1, 2, 3, 4, 5, 6, 7, 8], device="cuda")
    whole = case.run().view
    for pair in range(len(case.row_of)):
        assert same_bits(alone(case, pair).run().view[0], whole[pair]), f"pair {pair}"
    for tile in (gemv.Tile(4, sums=8), gemv.Tile(16, warps=2, registers=128)):
        assert same_bits(replace(case, extra={"tile": tile}).run().view, whole), tile


@pytest.mark.parametrize("format", FORMATS)
def test_gemv_has_the_cpu_references_bits(format) -> None:
    case = gemv_case(format, 96, 768, [5, 8])
    there = replace(
        case,
        rows=tuple(t.cuda() for t in case.rows),
        row_of=case.row_of.cuda(),
        w=case.w.cuda(),
        chunks=case.chunks.cuda(),
    )
    assert same_bits(there.run().view, case.run(gemv.gemv_ref).view)


def test_two_weights_and_scattered_rows_in_one_launch() -> None:
    case = gemv_case("q2_k", 96, 512, [4, 8], device="cuda")
    second = case.w.flip(1).contiguous()
    out2 = torch.full((12, 96), float("nan"), device="cuda")
    with backend.count_launches() as count:
        got = replace(case, extra={"w2": second, "out2": out2}).run()
    assert count.launches == 1
    assert same_bits(got.view, case.run().view)
    assert same_bits(out2, replace(case, w=second).run().view)
    order = torch.randperm(12, device="cuda").int()
    scattered = replace(case, extra={"out_row": order}).run().view
    assert same_bits(scattered[order.long()], got.view)


def test_weights_past_two_gib_are_addressed_in_64_bits() -> None:
    rows, kd, slots = 16384, 16384, 25
    book = gemv_case("q2_k", 64, kd, [2], slots=1, device="cuda")
    w = torch.zeros(slots, rows, book.w.shape[2], dtype=torch.uint8, device="cuda")
    w[-1] = book.w[0].repeat(rows // 64, 1)
    assert w.numel() > 2**31
    case = replace(book, w=w, chunks=torch.tensor([[slots - 1, 0, 2]], dtype=torch.int32, device="cuda"))
    assert same_bits(case.run().view[:, -64:], book.run().view)


def test_many_chunks_pass_the_grids_65535() -> None:
    case = gemv_case("q8_0", 8, 32, [1], slots=2, device="cuda")
    pairs = 70_001
    first = torch.arange(pairs, dtype=torch.int32, device="cuda")
    chunks = torch.stack([first % 2, first, torch.ones_like(first)], 1).contiguous()
    many = replace(case, row_of=torch.zeros(pairs, dtype=torch.int32, device="cuda"), chunks=chunks)
    out = many.run().view
    one, other = (
        replace(case, chunks=torch.tensor([[s, 0, 1]], dtype=torch.int32, device="cuda")).run().view for s in (0, 1)
    )
    assert torch.equal(out[::2], one.expand(35_001, -1))
    assert torch.equal(out[1::2], other.expand(35_000, -1))


def test_sizes_and_strides_do_not_multiply_compilations() -> None:
    """One compilation for each format, store dtype, lane count, option and power of two of rows, whatever the sizes."""

    def programs() -> int:
        return len(gemv._gemv.device_caches[torch.cuda.current_device()][0])

    gemv_case("q3_k", 64, 2048, [1], slots=1, device="cuda", dtype="f16").run()
    before = programs()
    for n, kd, slots in ((1, 1280, 1), (16, 4096, 2), (17, 3840, 16), (704, 2048, 17)):
        gemv_case("q3_k", n, kd, [4, 1, 3], slots=slots, device="cuda", dtype="f16").run()
    assert programs() == before


def test_shared_dot_is_not_tf32() -> None:
    out = torch.zeros(16, 16, device="cuda")
    backend.launch(_dot_kernel, (1,), torch.full_like(out, 1 + 2**-12), torch.ones_like(out), out, device=out.device)
    assert out[0, 0].item() == 16.00390625
    a, b = (torch.randint(-2, 3, (16, 16), device="cuda").bfloat16() for _ in range(2))
    backend.launch(_dot_kernel, (1,), a, b, out, device=out.device)
    assert torch.equal(out, a.float() @ b.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [0, 1, 7, 199])
def test_quantize_has_the_bits_of_its_reference(dtype, t) -> None:
    x = torch.randn(t, 2880, device="cuda") * torch.logspace(-40, 5, max(t, 1), device="cuda")[:t, None]
    x = torch.cat([x, torch.zeros(1, 2880, device="cuda"), torch.arange(2880, device="cuda")[None] / 2]).to(
        DTYPES[dtype]
    )
    on_gpu, on_cpu = quantize_rows.quantize_q8_1_ref(x), quantize_rows.quantize_q8_1_ref(x.cpu())
    for got, here, there in zip(quantize_rows.quantize_q8_1(x), on_gpu, on_cpu, strict=True):
        assert same_bits(got, there)
        assert same_bits(here, there)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["swiglu", "geglu"])
def test_activation(op, dtype) -> None:
    gate, up = (4 * torch.randn(2, 37, 1408, device="cuda")).to(DTYPES[dtype])
    got, want = getattr(activation, op)(gate, up, limit=7.0), getattr(activation, op + "_ref")(gate, up, limit=7.0)
    assert worst_relative(got, want) <= tol(f"activation/{dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_has_the_bits_of_its_reference(dtype) -> None:
    y = torch.randn(199, 6, 1408, device="cuda").to(DTYPES[dtype])
    w, gate = torch.rand(199, 6, device="cuda"), torch.rand(199, device="cuda")
    ids = torch.randint(-1, 8, (199, 6), device="cuda").int()
    order = torch.rand(199, 6, device="cuda").argsort(1).int()
    for options in (
        {},
        {"ids": ids},
        {"order": order, "out_dtype": torch.bfloat16},
        {"shared": y[:, 0], "shared_gate": gate, "ids": ids},
    ):
        assert same_bits(combine.combine(y, w, **options), combine.combine_ref(y, w, **options)), options.keys()


def test_launch_goes_to_the_tensors_device_and_leaves_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = gemv_case("q3_k", 60, 256, [3], device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert same_bits(case.run().view, case.run(gemv.gemv_ref).view)
    assert torch.cuda.current_device() == 0


def test_mixed_devices_are_refused_by_name() -> None:
    case = gemv_case("q3_k", 60, 256, [3], device="cuda")
    with pytest.raises(LabError, match=r"cuda:0.*cpu"):
        replace(case, row_of=case.row_of.cpu()).run()
