"""Routers, logits and plans for tests of the routing kernels, the same for the interpreter and the GPU."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from moe_lab.routing import Routing, route
from moe_lab.spec import RouterSpec
from moe_lab_kernels.route import plan, topk
from tests.support.kernel_cases import Guarded, same_bits

NAN, INF = math.nan, math.inf
# (spec, correction bias, per-expert scale)
ROUTERS: dict[str, tuple[RouterSpec, bool, bool]] = {
    "R8-K8-every-expert": (RouterSpec(8, 8, normalize=True), False, False),
    "R60-K4-softmax": (RouterSpec(60, 4), False, False),
    "R128-K8-normalised": (RouterSpec(128, 8, normalize=True), False, False),
    "R128-K8-per-expert-scale": (RouterSpec(128, 8, normalize=True), False, True),
    "R128-K4-softmax-of-picks": (RouterSpec(128, 4, score="none", weights_from="softmax_topk"), False, False),
    "R16-K1-sigmoid-of-pick": (RouterSpec(16, 1, score="none", weights_from="sigmoid_topk"), False, False),
    "R64-K6-max-norm-bias": (RouterSpec(64, 6, normalize=True, norm_kind="max", norm_eps=1e-12), True, False),
    "R160-K6-max-groups-fill-0": (
        RouterSpec(160, 6, scale=16.0, n_group=8, topk_group=3, group_score="max", group_fill=0.0), False, False),
    "R256-K8-top2-groups-bias": (
        RouterSpec(256, 8, score="sigmoid", normalize=True, norm_eps=1e-20, scale=2.5, n_group=8, topk_group=4),
        True, False),
    "R257-K16-softcap-temperature": (
        RouterSpec(257, 16, score="sigmoid", softcap=30.0, temperature=1.3, scale=3.0, scale_on="output"),
        False, False),
    "R384-K6-sqrt-softplus-bias": (
        RouterSpec(384, 6, score="sqrt_softplus", normalize=True, norm_eps=1e-20, scale=1.5), True, False),
    "R768-K12-zero-experts-bias": (RouterSpec(512, 12, zero_experts=256, scale=6.0), True, False),
    "R1024-K16": (RouterSpec(1024, 16), False, False),
}  # fmt: skip


def logits(t: int, r: int, seed: int = 0, kind: str = "normal") -> torch.Tensor:
    """fp32 [T, R]: "normal"; "ties" (few different values); "saturated" (float64 scores tie where the logits do not);
    "underflow" (far apart and far below); "broken" (NaN, infinities, whole rows of them)."""
    draw = torch.Generator().manual_seed(seed)
    z = torch.randn(t, r, generator=draw) * 3
    if kind == "ties":
        z = z.round()
    elif kind == "saturated":
        z = 36 + z / 2
    elif kind == "underflow":
        z = z * 300 - 500
    elif kind == "broken":
        where = torch.rand(t, r, generator=draw)
        for low, value in ((0.0, NAN), (0.05, -INF), (0.10, INF), (0.12, 0.0), (0.14, -0.0)):
            z = torch.where((where >= low) & (where < low + 0.02), value, z)
        for row, value in zip(range(0, t, 3), (NAN, -INF, INF) * t, strict=False):
            z[row] = value
    return z


def vectors(name: str, seed: int = 7, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The correction bias and per-expert scale of a router, where it has them."""
    spec, bias, scale = ROUTERS[name]
    draw = torch.Generator().manual_seed(seed)
    given = {}
    if bias:
        given["correction_bias"] = (torch.randn(spec.width, generator=draw) * 0.2).to(device)
    if scale:
        given["per_expert_scale"] = (torch.rand(spec.num_experts, generator=draw) * 2).to(device)
    return given


def differs(z: torch.Tensor, spec: RouterSpec, **given: torch.Tensor) -> str | None:
    """What topk gets different from torch's route on CPU: ids, weights (bits) or the rows flagged; None if nothing."""
    ids, weights, affected = (t.cpu() for t in topk.topk(z, spec, **given))
    want = route(z.cpu(), spec, backend="torch", **{name: v.cpu() for name, v in given.items()})
    if not torch.equal(ids, want.ids):
        row = int((ids != want.ids).any(1).nonzero()[0])
        return f"ids of row {row}: {ids[row].tolist()}, wanted {want.ids[row].tolist()}"
    if not same_bits(weights, want.weights):
        row = int((weights != want.weights).any(1).nonzero()[0])
        return f"weights of row {row}: {weights[row].tolist()}, wanted {want.weights[row].tolist()}"
    odd = (z.isnan() | (z == INF)).any(1).cpu()
    return None if torch.equal(affected, odd.int()) else f"rows {affected.tolist()}, wanted {odd.tolist()}"


def picks(t: int, k: int, e: int, width: int, seed: int = 0, kind: str = "uniform") -> Routing:
    """Ids [T, K] with skipped, zero-expert, duplicate and (on a device) impossible ones: "uniform", "one" expert takes
    all, "skewed", or "odd"."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, width, (t, k), generator=draw, dtype=torch.int32)
    if kind == "one":
        ids[:] = e - 1
    elif kind == "skewed":
        ids = (ids.double() ** 2 / width).int()
    elif kind == "odd":
        where = torch.rand(t, k, generator=draw)
        for low, value in ((0.0, -1), (0.2, -2), (0.25, width), (0.3, 2**31 - 1), (0.35, -(2**31))):
            ids = torch.where((where >= low) & (where < low + 0.05), torch.tensor(value, dtype=torch.int32), ids)
    return Routing(ids, torch.rand(t, k, generator=draw), width=width)


def plan_differs(got: plan.Plan, want: plan.Plan) -> str | None:
    """The first field that is not the same (entries past offsets[E] are undefined)."""
    real = int(want.offsets[-1])
    for name in plan.Plan._fields:
        a, b = (getattr(p, name).cpu() for p in (got, want))
        if name in ("token", "slot", "weight"):
            a, b = a[:real], b[:real]
        if not same_bits(a, b):
            return f"{name}: {a.tolist()}, wanted {b.tolist()}"
    return None


@contextmanager
def guarded_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Guarded]]:
    """Every torch.empty inside the block is poisoned and lies between guard values, which must survive."""
    made: list[Guarded] = []

    def empty(*shape, dtype=torch.float32, device="cpu", **_):
        size = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        buffer = Guarded(tuple(size), dtype, str(device)) if dtype.is_floating_point else _ints(size, dtype, device)
        made.append(buffer)
        return buffer.view

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield made
    assert made
    assert all(buffer.intact() for buffer in made), "a write outside an output"


class _IntGuard(Guarded):
    """As Guarded, poisoned with a number that is no id, count or place."""

    def __init__(self, size: torch.Size, dtype: torch.dtype, device: object) -> None:
        self.fill = -77
        n = size.numel()
        self.whole = torch.full((n + 128,), self.fill, dtype=dtype, device=device)
        self.view = self.whole[64 : 64 + n].view(size)
        self.view.fill_(-999_999)


def _ints(size: torch.Size, dtype: torch.dtype, device: object) -> _IntGuard:
    return _IntGuard(size, dtype, device)
