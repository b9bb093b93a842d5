"""How far the arms lie apart on a device, and an arm on the GPU from itself on the CPU: no times, numbers alone.

    PYTHONPATH=.:kernels python benchmarks/parity_table.py --out DIR [--device cuda] [--only q8_0]

Rows: the shipped model's six layers on its 512 recorded rows, and wide layers of heavy-tailed weights (rows of 2048
values) on rows of known statistics; fp32, picks made once on the CPU, so that a difference is arithmetic's. A row
`arms` compares two arms on the device; a row `devices` one arm's CPU path (a) with the device's kernels (b).
`nmse_a`, `nmse_b`: against the formula in float64. Prints the table and writes DIR/parity_table.csv. `--only`: models
whose names have this part, so that several processes may share the table.
"""

import argparse
import csv
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

import moe_lab as lab
from moe_lab.activations import Inputs
from moe_lab.bench.runner import measured_on
from moe_lab.numerics.distance import bits, nmse
from moe_lab.parity import draw, exact_layer, wide_layer
from moe_lab.routing import Routing
from moe_lab.stream.provider import ResidentExperts
from moe_lab.weights import on_device

ARMS = ("gemv", "mmq", "mmq_folded", "grouped")
WIDE = (("q2_k", "q3_k"), ("q4_k", "q6_k"), ("q8_0", "q8_0"), ("mxfp4", "nvfp4"))
STATISTICS, TOKENS = ("gaussian", "swiglu", "outliers"), 64
COLUMNS = ["what", "model", "layer", "tokens", "arm_a", "arm_b", "equal_share", "nmse_ab", "nmse_a", "nmse_b",
           "finite", "device", "backend", "driver", "torch", "triton", "commit"]  # fmt: skip


def cases(device: str, only: str) -> Iterator[tuple[str, Any, lab.MoELayer, lab.MoELayer, torch.Tensor]]:
    """(model, layer or statistics, the layer on the CPU, on the device, rows on the CPU)."""
    ckpt = lab.open(lab.sample())
    assert ckpt.spec is not None
    inputs = Inputs(ckpt.path, ckpt.spec.d_model, 512)
    for n in ckpt.moe_layers if only in ckpt.path.stem else ():
        yield ckpt.path.stem, n, ckpt.layer(n), ckpt.layer(n, device=device), inputs.layer(n)
    for gate, down in WIDE:
        if only not in f"wide {gate}+{down}":
            continue
        here = wide_layer(gate, down)
        assert isinstance(here.experts, ResidentExperts)
        stack, router = here.experts.stack, on_device(here.router_weights, device)
        gates, ups, downs = (q.to(device) for q in (stack.gate, stack.up, stack.down))
        there = lab.MoELayer.from_tensors(here.spec, router=router, gate=gates, up=ups, down=downs)
        for name in STATISTICS:
            yield f"wide {gate}+{down}", name, here, there, draw(name, TOKENS, here.spec.d_model)


def outputs(layer: lab.MoELayer, x: torch.Tensor, picks: Routing) -> dict[str, torch.Tensor]:
    """Of each arm that serves the layer there, on the CPU."""
    made = {}
    for arm in ARMS:
        try:
            made[arm] = layer(x, arm, routing=picks).out.cpu()
        except (RuntimeError, lab.LabError) as error:  # an arm that cannot, or a launch that fails: the others count
            print(f"no {arm} on {layer.device}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    return made


def rows(device: str, only: str) -> Iterator[dict[str, Any]]:
    """One for each pair of arms and each arm on both devices."""
    for model, which, here, there, x in cases(device, only):
        picks = here.route(x)
        moved = Routing(picks.ids.to(device), picks.weights.to(device), width=picks.width)
        exact = exact_layer(here, x, picks)
        own, other = outputs(here, x, picks), outputs(there, x.to(device), moved)
        pairs = [("arms", a, b, other[a], other[b]) for a, b in combinations(other, 2)]
        pairs += [("devices", a, a, own[a], other[a]) for a in other if a in own]
        for what, a, b, left, right in pairs:
            yield {
                "what": what, "model": model, "layer": which, "tokens": len(x), "arm_a": a, "arm_b": b,
                "equal_share": float((bits(left) == bits(right)).double().mean()),
                "nmse_ab": nmse(left, right), "nmse_a": nmse(left, exact), "nmse_b": nmse(right, exact),
                "finite": bool(left.isfinite().all() and right.isfinite().all()),
            }  # fmt: skip


def main() -> int:
    """Exit code 1 when an output is not finite."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", metavar="PART", help="models whose names have this part")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    where = {**measured_on(), "backend": "cuda" if args.device.startswith("cuda") else "torch"}
    finite = True
    with (args.out / "parity_table.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for row in rows(args.device, args.only):
            finite = finite and row["finite"]
            numbers = {k: f"{row[k]:.4g}" for k in ("equal_share", "nmse_ab", "nmse_a", "nmse_b")}
            table.writerow({**row, **numbers, **{k: v for k, v in where.items() if k in COLUMNS}})
            file.flush()
            print(*(f"{v!s:>10}" for v in {**row, **numbers}.values()))
    print("all finite" if finite else "NOT FINITE")
    return int(not finite)


if __name__ == "__main__":
    raise SystemExit(main())
