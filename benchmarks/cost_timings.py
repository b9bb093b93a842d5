"""c(M) of resident products on a CUDA GPU: what M rows cost together, over M times what one row costs.

    PYTHONPATH=.:kernels python benchmarks/cost_timings.py --out DIR [--formats bf16,int4_g64] [--rows 1,16]

One weight [N, Kd] at a time, rotating over as many as the L2 does not hold; rows 1 .. 64 through the decode kernel
(chunks of 8 rows), the tensor cores' form for 4-bit integers (16) and the grouped GEMM, each compared with float64
first. `best` takes the quickest at each M, as a caller would; `c` is over M times the best of one row. `bytes_share`:
bytes over the read bandwidth measured in the same run, as a share of the time: near 1 the product is bound by its
weights. Affine scales and biases are bf16, as files have them.
"""

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

import torch
from grouped_layers import DEVICE, one_weight

from moe_lab.bench.runner import bandwidth_gb_per_s, measured_on, time_calls
from moe_lab.errors import LabError
from moe_lab.tolerances import tol
from moe_lab_kernels.gemv_float import gemv_float as gf
from moe_lab_kernels.gemv_float import operands as fo
from moe_lab_kernels.gemv_float import tensor, tensor_ref
from moe_lab_kernels.grouped import grouped_gemm as gg
from moe_lab_kernels.grouped import operands as go
from moe_lab_kernels.grouped import tiles as gt
from moe_lab_kernels.storage.scaled_layouts import LAYOUTS

SHAPES = ((14336, 4096), (4096, 14336))
ROWS = (1, 2, 4, 8, 16, 32, 64)
L2_BYTES = 60e6
EVERY: dict[int, torch.Tensor] = {}  # 0 .. M - 1
COLUMNS = ["format", "N", "Kd", "rows", "arm", "ok", "us_p20", "us_p50", "us_p80", "c", "bytes_share", "n", "method",
           "read_gb_per_s", "device", "driver", "torch", "triton", "commit"]  # fmt: skip


def tiles_of(slot: int, rows: int, most: int) -> torch.Tensor:
    """(slot, first, rows) of each run of at most `most` rows."""
    entries = [[slot, i, min(most, rows - i)] for i in range(0, rows, most)]
    return torch.tensor(entries, dtype=torch.int32, device=DEVICE)


def decode(x: torch.Tensor, w: go.Weight, tiles: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The decode arm's product."""
    return gf.gemv_float(fo.Rows(x), fo.Pairs(EVERY[len(x)], tiles, min(8, len(x))), w, out)


def resident(x: torch.Tensor, w: go.Weight, tiles: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The product of a resident matrix on the tensor cores, as `lab.matmul` takes it for 4-bit integers."""
    return tensor.gemv_tensor(x, fo.Pairs(EVERY[len(x)], tiles, 8 if len(x) <= 8 else 16), w, out)


def grouped(x: torch.Tensor, w: go.Weight, tiles: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The grouped arm's."""
    return gg.grouped_product(x, None, w, gt.WorkList(tiles, gt.tokens_for(len(x), 1)), out)


ARMS = {
    "gemv": (decode, lambda rows: 8),
    "tensor": (resident, lambda rows: 16),
    "grouped": (grouped, lambda rows: gt.tokens_for(rows, 1)),
}


def weights(format: str, slots: int, n: int, kd: int) -> go.Weight:
    """Random rows, scales and biases of affine formats in bf16."""
    w = one_weight(format, slots, n, kd, torch.Generator(DEVICE).manual_seed(1))
    if w.scales is None or LAYOUTS[format].second != "bias":
        return w
    return w._replace(scales=w.scales.bfloat16(), second=w.second.bfloat16())  # type: ignore[union-attr]


def right(op: Any, x: torch.Tensor, w: go.Weight, tiles: torch.Tensor, out: torch.Tensor) -> str:
    """ "yes" or how far from float64."""
    out.fill_(float("nan"))
    got, want = op(x, w, tiles, out).double(), x.double() @ go.values_ref(w, 0, torch.float32).double().T
    far = float((got - want).square().sum() / want.square().sum())
    return "yes" if far <= tol("store/bf16") else f"WRONG: NMSE {far:.1e}"


def rows_of(format: str, n: int, kd: int, counts: list[int], budget_ms: float, read: float) -> list[dict[str, Any]]:
    """All M of one product; `c` over the best arm's one row, where that was timed."""
    bytes_a_weight = {"bf16": 2.0, "int4_g64": 0.5 + 4 / 64, "int4_g128": 0.5 + 4 / 128}.get(format, 1.0)
    slots = max(2, -(-int(1.5 * L2_BYTES) // int(bytes_a_weight * n * kd)))
    w = weights(format, slots, n, kd)
    made: list[dict[str, Any]] = []
    for rows in counts:
        x = torch.randn(rows, kd, device=DEVICE).bfloat16()
        EVERY[rows] = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        out = torch.empty(rows, n, dtype=torch.bfloat16, device=DEVICE)
        for arm, (op, most) in ARMS.items():
            if arm == "tensor" and tensor_ref.refusal(format, kd) is not None:
                continue
            tiles = [tiles_of(s, rows, most(rows)) for s in range(slots)]
            ok = right(op, x, w, tiles[0], out)
            row: dict[str, Any] = {"format": format, "N": n, "Kd": kd, "rows": rows, "arm": arm, "ok": ok}
            if ok == "yes":
                t = time_calls([lambda i=i, op=op, x=x, out=out: op(x, w, i, out) for i in tiles], budget_ms)
                floor = sum(p.numel() * p.element_size() for p in w if torch.is_tensor(p)) / slots / read / 1e3
                row |= {f"us_p{p}": getattr(t, f"us_p{p}") for p in (20, 50, 80)} | {"n": t.n, "method": t.method}
                row["bytes_share"] = f"{floor / t.us_p50:.2f}"
            made.append(row)
        timed = [r for r in made if r["rows"] == rows and r["ok"] == "yes" and r["arm"] in ARMS]
        if timed:
            made.append({**min(timed, key=lambda r: r["us_p50"]), "arm": "best"})
    one = next((r["us_p50"] for r in made if r["rows"] == 1 and r["arm"] == "best"), None)
    for r in made:
        if r["ok"] == "yes":
            r["c"] = f"{r['us_p50'] / r['rows'] / one:.3f}" if one else ""
            r |= {name: f"{r[name]:.2f}" for name in ("us_p20", "us_p50", "us_p80")}
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description="c(M) of resident products; writes cost_timings.csv.")
    parser.add_argument("--out", type=Path, required=True, help="folder for cost_timings.csv")
    parser.add_argument("--formats", default="bf16,int4_g64")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--budget-ms", type=float, default=20.0)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise LabError("cost_timings needs a CUDA GPU; torch sees none.")
    args.out.mkdir(parents=True, exist_ok=True)
    read, where, failed = bandwidth_gb_per_s()["read"], measured_on(), 0
    with (args.out / "cost_timings.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for format in args.formats.split(","):
            for n, kd in SHAPES:
                for row in rows_of(format, n, kd, [int(m) for m in args.rows.split(",")], args.budget_ms, read):
                    table.writerow({**row, **where, "read_gb_per_s": f"{read:.0f}"})
                    file.flush()
                    failed += row["ok"].startswith("WRONG")
                    print(*(f"{row.get(c, '')!s:>10}" for c in COLUMNS[:11]), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
