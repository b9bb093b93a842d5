"""The experts' two launches have the bits of the launches they replace, wherever rows go and weights lie."""

from collections.abc import Callable

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab_kernels.gemv import gemv, lane_rows
from moe_lab_kernels.gemv import mlp as gemv_mlp
from moe_lab_kernels.gemv.hand_over import LINE, scratch
from moe_lab_kernels.gemv.mlp_call import Experts
from moe_lab_kernels.gemv.ref import lanes_of
from moe_lab_kernels.gemv.tiles import Tile
from moe_lab_kernels.rows import activation
from moe_lab_kernels.rows.hidden import Gate
from moe_lab_kernels.slots.pointer_table import PointerTable
from tests.support.kernel_cases import DTYPES, Guarded, same_bits, weights

pytestmark = pytest.mark.usefixtures("interpreter")
S, T = 5, 3
# three rows that share a slot, one alone; a slot that is none, one that is not there, no rows. Pair 4 is in no chunk.
CHUNKS = torch.tensor([[1, 0, 3], [3, 3, 1], [-1, 4, 1], [5, 4, 1], [2, 0, 0], [-1, 0, 0]]).int()
ROW_OF = torch.tensor([0, 1, 2, 1, 0], dtype=torch.int32)
OUT_ROW = torch.tensor([1, 2, 4, 3, 0], dtype=torch.int32)
FORMATS = ("mxfp4", "mxfp4")
Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def experts_of(formats: tuple[str, str], d: int, f: int) -> Matrices:
    return weights(formats[0], S, f, d), weights(formats[0], S, f, d, 1), weights(formats[1], S, d, f, 2)


def rows(d: int = 64, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(T, d, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def experts() -> Matrices:
    return experts_of(FORMATS, 64, 64)


@pytest.fixture(scope="module")
def usual(experts: Matrices) -> torch.Tensor:
    return together(rows(), experts)


def apart(x: torch.Tensor, experts: Matrices, formats, store, act: Callable = activation.swiglu) -> torch.Tensor:
    gate, up, down = experts
    p, more = len(ROW_OF), {"max_rows": 4}
    g, u = (torch.full((p, gate.shape[1]), float("nan"), dtype=store) for _ in range(2))
    gemv.gemv(lane_rows.quantize_lanes(x, formats[0]), ROW_OF, gate, CHUNKS, formats[0], g, w2=up, out2=u, **more)
    y, h = torch.full((p, down.shape[1]), float("nan"), dtype=store), lane_rows.quantize_lanes(act(g, u), formats[1])
    return gemv.gemv(h, torch.arange(p).int(), down, CHUNKS, formats[1], y, out_row=OUT_ROW, **more)


def together(
    x, experts, formats=FORMATS, store=torch.bfloat16, op=gemv_mlp.gemv_mlp, chunks=CHUNKS, **options
) -> torch.Tensor:
    y = Guarded((len(ROW_OF), experts[2].shape[1]), store, "cpu")
    how = Gate(**{name: options.pop(name) for name in Gate._fields if name in options})
    more = {"max_rows": 4, **options}
    op(x, ROW_OF, Experts(*experts, *formats), chunks, y.view, OUT_ROW, how=how, store=store, **more)
    assert y.intact()
    return y.view


@pytest.mark.parametrize(
    ("store", "scale", "options"),
    [
        ("bf16", 1, {}),
        ("f32", 1, {"gelu": True}),
        ("f16", 9, {"limit": 2.0, "limit_mode": "oai", "alpha": 1.702}),
    ],
    ids=lambda v: "-".join(map(str, v.values())) if isinstance(v, dict) else None,
)
def test_bits_of_the_launches_one_by_one(experts: Matrices, store: str, scale: float, options: dict) -> None:
    dtype, rest = DTYPES[store], {k: v for k, v in options.items() if k != "gelu"}
    op = activation.geglu if options.get("gelu") else activation.swiglu
    want = apart(rows(64, scale), experts, FORMATS, dtype, lambda g, u: op(g, u, **rest))
    got = together(rows(64, scale), experts, store=dtype, **options)
    assert same_bits(got, want)
    assert got[0].isnan().all()  # of the pair in no chunk, nothing is written
    assert got[1:].isfinite().all()


@pytest.mark.parametrize(
    ("formats", "d", "f"), [(("q8_0", "q4_0"), 32, 288), (("q2_k", "q3_k"), 256, 256)], ids=["q8_0-q4_0", "q2_k-q3_k"]
)
def test_super_blocks_totals_and_a_group_that_is_not_full(formats: tuple[str, str], d: int, f: int) -> None:
    """F = 288 in tiles of 256 rows: fewer programs make up the last group of hidden values."""
    own = experts_of(formats, d, f)
    want = apart(rows(d), own, formats, torch.bfloat16)
    assert same_bits(together(rows(d), own, formats), want)


def test_a_tile_is_no_lower_than_the_rows_that_lie_side_by_side() -> None:
    """Rows of one block are walked by four lanes, eight rows a warp."""
    own = experts_of(("q8_0", "q8_0"), 32, 32)
    assert 32 // lanes_of("q8_0", 32).row == 8
    want = apart(rows(32), own, ("q8_0", "q8_0"), torch.bfloat16)
    assert same_bits(together(rows(32), own, ("q8_0", "q8_0"), tile=Tile(4), down_tile=Tile(4)), want)


def test_no_tile_and_no_chunk_shows(experts: Matrices, usual: torch.Tensor) -> None:
    alone = torch.stack([torch.tensor([1, 1, 1, 3]), torch.arange(4), torch.ones(4)], 1).int()
    tile = Tile(32, sums=32, shared=2)
    assert same_bits(together(rows(), experts, tile=tile, down_tile=Tile(64, sums=64), max_rows=8), usual)
    four, down = Tile(32, warps=4, sums=32, shared=2), Tile(64, warps=4, sums=64)
    assert same_bits(together(rows(), experts, tile=four, down_tile=down, max_rows=8), usual)
    assert same_bits(together(rows(), experts, chunks=alone, max_rows=1), usual)


def test_weights_in_allocations_of_their_own(experts: Matrices, usual: torch.Tensor) -> None:
    tables = [PointerTable.of([w[i : i + 1].clone() for i in range(S)]) for w in experts]
    assert same_bits(together(rows(), tables), usual)


def test_a_row_of_nans_stays_alone(experts: Matrices, usual: torch.Tensor) -> None:
    x = rows()
    x[1, 7] = float("nan")
    got = together(x, experts)
    spoilt = OUT_ROW[ROW_OF == 1].long()
    clean = [i for i in range(len(got)) if i not in spoilt.tolist()]
    assert same_bits(got[clean], usual[clean])
    assert got[spoilt].isnan().all()


def test_the_reference_meets_it(experts: Matrices) -> None:
    """Only fp32's exp may differ, and by it a code of a hidden row: see `activation`."""
    got = together(rows(), experts, store=torch.float32)[1:]
    want = together(rows(), experts, store=torch.float32, op=gemv_mlp.gemv_mlp_ref)[1:]
    assert float((got - want).square().sum() / want.square().sum()) <= 1e-4


def test_empty_batches_and_misfits(experts: Matrices) -> None:
    gate, up, down = experts
    none, y = torch.zeros(0, dtype=torch.int32), torch.zeros(5, 64)
    empty = gemv_mlp.gemv_mlp(rows()[:0], none, Experts(*experts, *FORMATS), CHUNKS[:0], y[:0], none)
    assert empty.shape == (0, 64)
    for bad, message in (
        ((gate, up[:, :32], down), r"up must have shape \[S, 64, 34\], got \[5, 32, 34\]"),
        ((gate, up, down[:4]), r"as many slots, got \[5, 5, 4\]"),
        ((PointerTable.of([gate]), up, down), "all tensors or all tables of addresses"),
    ):
        with pytest.raises(LabError, match=message):
            gemv_mlp.gemv_mlp(rows(), ROW_OF, Experts(*bad, *FORMATS), CHUNKS, y, OUT_ROW)
    for how, message in (
        (Gate(limit_mode="oai"), "limit_mode='oai' clamps, so it needs a limit"),
        (Gate(weight=torch.ones(5)), "gemv_mlp puts no weight on hidden rows"),
    ):
        with pytest.raises(LabError, match=message):
            gemv_mlp.gemv_mlp(rows(), ROW_OF, Experts(*experts, *FORMATS), CHUNKS, y, OUT_ROW, how=how)


@pytest.mark.parametrize(("chunks", "pairs", "f", "row_bytes"), [(1, 1, 704, 704), (33, 64, 768, 1024), (6, 5, 64, 96)])
def test_no_two_hidden_rows_share_a_cache_line(chunks: int, pairs: int, f: int, row_bytes: int) -> None:
    """Programs read them without an acquire: a line must hold nothing that is made later."""
    own = scratch(chunks, pairs, f, row_bytes)
    starts = [4 * own.cleared, 4 * own.words - pairs * 8 * own.groups, own.row_bytes, 2 * own.groups, 4 * own.groups]
    assert not any(at % LINE for at in starts)
    assert own.cleared >= chunks + 2 * pairs * f
    assert own.row_bytes >= row_bytes
    assert own.groups >= f // 32
    assert 4 * (own.words - own.cleared) == pairs * (own.row_bytes + (2 + 2 + 4) * own.groups)
