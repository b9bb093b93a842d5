"""One routed layer on the float GEMV, planned once and called often: what its benchmark times and checks.

From given picks on: gate + up + activation in one launch, down scattered into token order, weighted sum. T tokens, K
experts a token, P = T * K pairs, D model width, F expert width, E experts. Weights of every format that the float GEMV
multiplies; gpt-oss's form (clamped activation, biases) where asked for. Nothing of the lab's own layer is in the way.
"""

from dataclasses import dataclass

import torch

from moe_lab._types import Tensor
from moe_lab.bench.workloads import LayerShape, routings
from moe_lab.formats import FORMATS, quantize
from moe_lab_kernels import backend
from moe_lab_kernels.gemv_float import gemv_float as gf
from moe_lab_kernels.gemv_float.operands import DENSE, Bias, Gate, Pairs, Rows
from moe_lab_kernels.gemv_float.ref import values_ref
from moe_lab_kernels.gemv_float.tiles import FloatTile
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.rows import combine, quantize_fp8

OAI = Gate(limit=7.0, limit_mode="oai", alpha=1.702)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights [E, F, D], [E, F, D], [E, D, F], biases or None, the hidden rows' formula; `fp8`: e4m3 activations."""

    gate: Weight
    up: Weight
    down: Weight
    biases: tuple[Bias | None, Bias | None, Bias | None] = (None, None, None)
    how: Gate = gf.PLAIN_GATE
    fp8: bool = False


def bytes_a_weight(format: str) -> float:
    """Scales counted, as they are stored here (bf16 for affine formats, fp32 for FP8 blocks)."""
    return FORMATS[format].bits_per_weight / 8


def make_layer(
    shape: LayerShape, format: str, seed: int, device: str, *, oai: bool = False, fp8: bool = False
) -> Layer:
    """Genuinely quantised rows: 128 Gaussian rows a matrix, dealt at random to the rows of every expert."""
    draw = torch.Generator().manual_seed(seed)
    e, d, f = shape.experts, shape.d_model, shape.d_expert

    def deal(n: int, kd: int) -> Weight:
        book = quantize((torch.randn(128, kd, generator=draw) / kd**0.5).to(device), format)
        pick = torch.randint(128, (e, n), generator=draw).to(device)
        whole = format == "fp8_block"  # 128 rows share a scale: the book has one row of them
        of = pick[:, : -(-n // 128)] * 0 if whole else pick
        scales = None if book.scales is None else book.scales[of]
        second = None if book.biases is None else book.biases[of]
        if second is not None and scales is not None:  # affine formats' files hold both in bf16
            scales, second = scales.bfloat16(), second.bfloat16()
        if book.global_scale is not None:
            second = book.global_scale.reshape(()).expand(e).contiguous()
        data = book.data.view(DENSE[format]) if format in DENSE else book.data
        return Weight(data[pick], format, kd, scales, second)

    biases = tuple(Bias(torch.randn(e, n, generator=draw).to(device)) for n in (f, f, d)) if oai else (None,) * 3
    return Layer(deal(f, d), deal(f, d), deal(d, f), biases, OAI if oai else gf.PLAIN_GATE, fp8)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One input with its plan (pairs sorted by expert, chunks of at most 8) and the buffers of its products."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    up_pairs: Pairs
    down_pairs: Pairs
    hidden: Tensor
    y: Tensor


def make_call(shape: LayerShape, ids: Tensor, weights: Tensor, device: str) -> Call:
    """Plan one routing (ids int32 [T, K]) for fresh Gaussian bf16 rows; hidden rows are in pair order. Chunks are said
    to hold as many rows as T allows, as a plan made on the device says."""
    t, k = ids.shape
    expert, order = ids.cpu().flatten().sort(stable=True)
    chunks, first = [], 0
    for e, n in zip(*(v.tolist() for v in expert.unique_consecutive(return_counts=True)), strict=True):
        chunks += [(e, first + i, min(8, n - i)) for i in range(0, n, 8)]
        first += n
    most = next(n for n in (1, 2, 4, 8) if n >= min(t, 8))
    table = torch.tensor(chunks, dtype=torch.int32, device=device)
    own = torch.arange(t * k, dtype=torch.int32, device=device)
    hidden, y = (torch.full((t * k, n), float("nan"), dtype=torch.bfloat16, device=device)
                 for n in (shape.d_expert, shape.d_model))  # fmt: skip
    x = torch.randn(t, shape.d_model, device=device).bfloat16()
    up_pairs = Pairs((order // k).int().to(device), table, most)
    return Call(
        x, ids.to(device), weights.to(device), up_pairs, Pairs(own, table, most, order.int().to(device)), hidden, y
    )


def rows_of(x: Tensor, layer: Layer) -> Rows:
    """Activations as the products read them."""
    return Rows(*quantize_fp8.quantize_fp8(x)) if layer.fp8 else Rows(x)


def gated(c: Call, w: Layer, tile: FloatTile | None = None, early: gf.Early = "", rows: Rows | None = None) -> None:
    """c.hidden [P, F]. `rows`: those of c.x, where they are made already."""
    more = {"how": w.how, "tile": tile, "early": early, "gate_bias": w.biases[0], "up_bias": w.biases[1]}
    gf.gemv_float_gated(rows or rows_of(c.x, w), c.up_pairs, w.gate, w.up, c.hidden, **more)


def down(c: Call, w: Layer, tile: FloatTile | None = None, early: gf.Early = "", rows: Rows | None = None) -> None:
    """c.y [P, D] in token order. `rows`: those of c.hidden, where they are made already."""
    bias = w.biases[2]
    gf.gemv_float(rows or rows_of(c.hidden, w), c.down_pairs, w.down, c.y, bias=bias, tile=tile, early=early)


def weighted_sum(c: Call) -> Tensor:
    """[T, D]."""
    return combine.combine(c.y.view(*c.ids.shape, -1), c.weights, pdl=backend.has_early_start(c.x.device))


def run(c: Call, w: Layer) -> Tensor:
    """The routed layer [T, D], bf16, in three launches (five with e4m3 activations), each of which starts while the
    one before still runs, where the GPU can."""
    gated(c, w, early="launch")
    down(c, w, early="weights")
    return weighted_sum(c)


def exact(c: Call, w: Layer) -> Tensor:
    """The same mathematics in fp32 on the decoded weights, without store points."""
    out = torch.zeros(c.x.shape, device=c.x.device)
    for e in c.ids.unique().tolist():
        token, slot = (c.ids == e).nonzero(as_tuple=True)
        x = c.x[token].float()
        g, u = (x @ values_ref(m, e).T for m in (w.gate, w.up))
        b = [None if v is None else v.values[e] for v in w.biases]
        if b[0] is not None and b[1] is not None:
            g, u = (g + b[0]).clamp(max=7.0), (u + b[1]).clamp(-7.0, 7.0)
            h = g * torch.sigmoid(1.702 * g) * (u + 1)
        else:
            h = torch.nn.functional.silu(g) * u
        y = h @ values_ref(w.down, e).T
        out.index_add_(0, token, c.weights[token, slot, None] * (y if b[2] is None else y + b[2]))
    return out


def distance(shape: LayerShape, w: Layer, tokens: int, seed: int, device: str) -> float:
    """NMSE against `exact` of a fresh input's layer, in poisoned buffers."""
    c = make_call(shape, *routings(shape, tokens, seed=seed)[-1], device)
    return _nmse(run(c, w), exact(c, w))


def check(shape: LayerShape, w: Layer, tokens: int, seed: int, device: str) -> tuple[float, list[str]]:
    """`distance`, and the steps whose bits differ from the torch reference (the products; hidden rows meet theirs
    within fp32's `exp`, so they are compared as products)."""
    c = make_call(shape, *routings(shape, tokens, seed=seed)[-1], device)
    whole, wrong, made = run(c, w), [], {}
    for name, op in (("kernel", gf.gemv_float), ("reference", gf.gemv_float_ref)):
        g, u = torch.full_like(c.hidden, float("nan")), torch.full_like(c.hidden, float("nan"))
        y, into = torch.full_like(c.y, float("nan")), c.up_pairs._replace(to=c.down_pairs.row_of)
        for rows, pairs, weight, bias, out in (
            (rows_of(c.x, w), into, w.gate, w.biases[0], g),
            (rows_of(c.x, w), into, w.up, w.biases[1], u),
            (rows_of(c.hidden, w), c.down_pairs, w.down, w.biases[2], y),
        ):
            op(rows, pairs, weight, out, bias=bias, early="weights")
        made[name] = g, u, y
    for what, a, b in zip(("gate", "up", "down"), made["kernel"], made["reference"], strict=True):
        wrong += [] if torch.equal(a, b) else [what]
    wrong += [] if torch.equal(made["kernel"][2], c.y) else ["down again"]
    from moe_lab_kernels.rows import activation

    g, u, _ = made["kernel"]
    own = activation.swiglu(g, u, limit=w.how.limit, limit_mode=w.how.limit_mode, alpha=w.how.alpha)
    wrong += [] if torch.equal(own, c.hidden) else ["gated"]
    return _nmse(whole, exact(c, w)), wrong


def _nmse(out: Tensor, target: Tensor) -> float:
    far = (out.double() - target.double()).square().sum()
    return float(far / target.double().square().sum())
