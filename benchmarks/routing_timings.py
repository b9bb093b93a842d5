"""Timings of the routing kernels on a CUDA GPU: top-k, plan, both in one launch, and the router's product.

    PYTHONPATH=.:kernels python benchmarks/routing_timings.py --out DIR [--budget-ms 10] [--only topk,plan,...]

Before anything is timed each case runs on fresh inputs into poisoned outputs and is compared with torch on the CPU:
ids, weights and plans bit for bit, the router's product within the tolerance table. A wrong result has no time. A call
is one node of a CUDA graph that holds 16 of them on rotating inputs; times are microseconds a call, spread over
replays. `floor_us`: the bytes that must move over the bandwidth measured in the same run; `target_us` where one is set.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_lab.bench.runner import bandwidth_gb_per_s, measured_on, time_calls
from moe_lab.errors import LabError
from moe_lab.routing import route
from moe_lab.spec import RouterSpec
from moe_lab.tolerances import tol
from moe_lab_kernels.route import plan, route_plan, router, topk

ROTATION = 16
SPECS = {
    "R128-K8": RouterSpec(128, 8, normalize=True),
    "R256-K8-groups-bias": RouterSpec(
        256, 8, score="sigmoid", normalize=True, norm_eps=1e-20, scale=2.5, n_group=8, topk_group=4),
    "R384-K6-sqrt-softplus-bias": RouterSpec(384, 6, score="sqrt_softplus", normalize=True, norm_eps=1e-20, scale=1.5),
    "R768-K12-zero-experts-bias": RouterSpec(512, 12, zero_experts=256, scale=6.0),
}  # fmt: skip
ROUTERS = {"D2048-R128": (2048, 128), "D7168-R256": (7168, 256)}
TARGETS = {
    ("topk", "R128-K8", 1): 3.0,
    ("topk", "R128-K8", 8192): 15.0,
    ("plan", "R128-K8", 1): 4.0,
    ("plan", "R128-K8", 8192): 24.0,
    **{("route_plan", "R128-K8", t): 5.0 for t in (1, 2, 4, 8)},
}
TIMED = ("us_p20", "us_p50", "us_p80", "target_us", "bytes", "floor_us", "ratio_to_floor", "n", "method")
COLUMNS = ["what", "case", "T", "ok", *TIMED, "device", "driver", "torch", "triton", "commit"]


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one shape: `make` draws inputs and gives the call and its check (None: right)."""

    what: str
    name: str
    t: int
    bytes: float
    make: Callable[[], tuple[Callable[[], Any], Callable[[Any], str | None]]]


def _fresh(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda") * 3


def _poison() -> None:
    """Freed memory full of NaN, which the allocator hands to the next outputs."""
    torch.full((1 << 22,), float("nan"), device="cuda")


def _bias(name: str) -> dict[str, torch.Tensor]:
    spec = SPECS[name]
    return {"correction_bias": torch.randn(spec.width, device="cuda") * 0.2} if "bias" in name else {}


def _wrong_routing(
    ids: torch.Tensor, weights: torch.Tensor, z: torch.Tensor, spec: RouterSpec, more: dict
) -> str | None:
    want = route(z.cpu(), spec, backend="torch", **{k: v.cpu() for k, v in more.items()})
    if not torch.equal(ids.cpu(), want.ids):
        return "ids"
    return None if torch.equal(weights.cpu(), want.weights) else "weights"


def _wrong_plan(got: plan.Plan, ids: torch.Tensor, weights: torch.Tensor, spec: RouterSpec) -> str | None:
    want = plan.plan_ref(ids.cpu(), weights.cpu(), spec.num_experts, spec.width)
    real = int(want.offsets[-1])
    for name in plan.Plan._fields:
        a, b = getattr(got, name).cpu(), getattr(want, name)
        if name in ("token", "slot", "weight"):
            a, b = a[:real], b[:real]
        if not torch.equal(a, b):
            return name
    return None


def topk_case(name: str, t: int) -> Case:
    spec, more = SPECS[name], _bias(name)

    def make():
        z = _fresh(t, spec.width)
        return lambda: topk.topk(z, spec, **more), lambda y: _wrong_routing(y[0], y[1], z, spec, more)

    return Case("topk", name, t, t * (4 * spec.width + 8 * spec.top_k + 4), make)


def plan_case(name: str, t: int) -> Case:
    spec = SPECS[name]

    def make():
        ids = torch.rand(t, spec.width, device="cuda").argsort(1)[:, : spec.top_k].int().contiguous()
        w = torch.rand(t, spec.top_k, device="cuda")
        call = lambda: plan.plan(ids, w, spec.num_experts, spec.width)  # noqa: E731
        return call, lambda y: _wrong_plan(y, ids, w, spec)

    return Case("plan", name, t, 20 * t * spec.top_k + 8 * spec.num_experts, make)


def route_plan_case(name: str, t: int) -> Case:
    spec, more = SPECS[name], _bias(name)

    def make():
        z = _fresh(t, spec.width)

        def wrong(y):
            return _wrong_routing(y.ids, y.weights, z, spec, more) or _wrong_plan(y.plan, y.ids, y.weights, spec)

        return lambda: route_plan.route_plan(z, spec, **more), wrong

    bytes_moved = t * (4 * spec.width + 20 * spec.top_k) + 8 * spec.num_experts
    return Case("route_plan", name, t, bytes_moved, make)


def router_case(name: str, t: int) -> Case:
    d, r = ROUTERS[name]

    def make():
        x, w = (_fresh(n, d).bfloat16() for n in (t, r))

        def wrong(y):
            size = x.double().abs() @ w.double().abs().T
            off = ((y - router.router_ref(x, w)).double().abs() / size).max()
            return None if float(off) <= tol("router/product") else f"off by {float(off):.1e}"

        return lambda: router.router(x, w), wrong

    return Case("router", name, t, 2 * (t + r) * d + 4 * t * r, make)


def cases() -> Iterator[Case]:
    for name in SPECS:
        for t in (1, 8, 64, 1024, 8192):
            yield topk_case(name, t)
        for t in (1, 8, 64, 128, 256, 1024, 8192, 131_072):
            if t <= 8192 or name == "R128-K8":
                yield plan_case(name, t)
        for t in (1, 2, 4, 8):
            if route_plan.unserved(torch.empty(t, SPECS[name].width), SPECS[name]) is None:
                yield route_plan_case(name, t)
    for name in ROUTERS:
        for t in (1, 8, 64, 1024, 8192):
            yield router_case(name, t)


def measure(case: Case, roof: float, budget_ms: float) -> dict[str, Any]:
    """One row. A wrong result gives its name and no time."""
    head = {"what": case.what, "case": case.name, "T": case.t}
    made = [case.make() for _ in range(ROTATION)]
    for call, wrong in made[:2]:
        _poison()
        why = wrong(call())
        if why:
            return {**head, "ok": f"WRONG: {why}"}
    timed = time_calls([call for call, _ in made], budget_ms)
    floor, target = case.bytes / roof / 1e3, TARGETS.get((case.what, case.name, case.t))
    return {
        **head,
        "ok": "yes" if target is None or timed.us_p50 <= target else "slow",
        **{f"us_p{p}": f"{getattr(timed, f'us_p{p}'):.2f}" for p in (20, 50, 80)},
        "target_us": "" if target is None else target,
        "bytes": int(case.bytes),
        "floor_us": f"{floor:.2f}",
        "ratio_to_floor": f"{timed.us_p50 / max(floor, 1e-3):.1f}",
        "n": timed.n,
        "method": timed.method,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Timings of the routing kernels; writes routing_timings.csv.")
    parser.add_argument("--out", type=Path, required=True, help="folder for routing_timings.csv")
    parser.add_argument("--budget-ms", type=float, default=10.0)
    parser.add_argument("--only", default="topk,plan,route_plan,router", help="operations to time, by name")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise LabError("routing_timings needs a CUDA GPU; torch sees none.")
    args.out.mkdir(parents=True, exist_ok=True)
    begin, where, wrong = time.perf_counter(), measured_on(), 0
    roof = max(bandwidth_gb_per_s().values())
    with (args.out / "routing_timings.csv").open("w", newline="") as f:
        table = csv.DictWriter(f, COLUMNS)
        table.writeheader()
        for case in cases():
            if case.what not in args.only.split(","):
                continue
            row = measure(case, roof, args.budget_ms)
            table.writerow({**row, **where})
            f.flush()
            wrong += row["ok"].startswith("WRONG")
            cells = (row.get(c, "") for c in ("us_p20", "us_p50", "us_p80", "target_us", "floor_us"))
            print(f"{case.what:10} {case.name:28} T={case.t:<6} {row['ok']:6}", *(f"{c:>8}" for c in cells), flush=True)
    print(f"{where['device']}, {roof:.0f} GB/s; {time.perf_counter() - begin:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
