"""Timings of the activation quantisers on a CUDA GPU: every layout, 1 to 8192 rows, the layout's own arithmetic.

    PYTHONPATH=.:kernels python benchmarks/activation_timings.py --out DIR [--budget-ms 10] [--only d4,fp8] [--tiles]

Before anything is timed each case runs on fresh bf16 rows into poisoned outputs and is compared with the torch
reference on the CPU, bit for bit. A wrong result has no time. A call is one node of a CUDA graph that holds 16 of them
on rotating inputs (fewer where inputs are large); times are microseconds a call, spread over replays. `floor_us`: rows
in, codes, scales and sums out, over the bandwidth measured in the same run; up to 60 MiB of rotating rows may stay in
the GPU's cache, which can beat that floor. `--tiles` also times other tiles, a row each.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_lab.bench.runner import bandwidth_gb_per_s, measured_on, time_calls
from moe_lab.errors import LabError
from moe_lab_kernels.rows.arithmetic import LAYOUTS
from moe_lab_kernels.rows.quantize_fp8 import quantize_fp8, quantize_fp8_ref
from moe_lab_kernels.rows.quantize_rows import Tile, quantize_int8, quantize_int8_ref

ROWS, WIDTHS = (1, 8, 64, 512, 8192), (2048, 4096, 7168)
TILES = [Tile(v, w) for v, w in ((128, 1), (256, 1), (512, 1), (512, 2), (1024, 1), (1024, 2), (1024, 4), (2048, 2),
                                 (2048, 4), (4096, 4), (4096, 8))]  # fmt: skip
CHECKED_ROWS = 512  # the reference of more rows on the CPU would take longer than all timings
TIMED = ("us_p20", "us_p50", "us_p80", "gb_per_s", "bytes", "floor_us", "ratio_to_floor", "n", "method")
COLUMNS = ["what", "layout", "R", "Kd", "tile", "ok", *TIMED, "device", "driver", "torch", "triton", "commit"]


@dataclass(frozen=True, slots=True)
class Case:
    """One layout at one shape; tile None is the launcher's own."""

    layout: str
    rows: int
    kd: int
    tile: Tile | None

    @property
    def rotation(self) -> int:
        """Inputs to rotate over: 16, or what 2 GiB hold."""
        return max(2, min(16, (1 << 31) // (2 * self.rows * self.kd)))

    def call(self, x: torch.Tensor) -> Callable[[], Any]:
        """The operation on `x`."""
        if self.layout == "fp8":
            return partial(quantize_fp8, x, tile=self.tile)
        return partial(quantize_int8, x, self.layout, tile=self.tile)

    def wrong(self, x: torch.Tensor) -> str | None:
        """What differs from the reference on the CPU in the first and last rows, or None."""
        n = min(len(x), CHECKED_ROWS)
        for name, rows in (("first", slice(0, n)), ("last", slice(len(x) - n, len(x)))):
            here = x[rows].cpu()
            want = quantize_fp8_ref(here) if self.layout == "fp8" else quantize_int8_ref(here, self.layout)
            got = self.call(x)()
            for part, a, b in zip(("codes", "scale", "total"), got, want, strict=False):
                if a is not None and b is not None and not torch.equal(_raw(a[rows].cpu()), _raw(b)):
                    return f"{part} of the {name} rows"
        return None


def _raw(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def _poison() -> None:
    """Freed memory full of NaN, which the allocator hands to the next outputs."""
    torch.full((1 << 24,), float("nan"), device="cuda")


def cases(only: list[str], tiles: bool) -> Iterator[Case]:
    for layout in only:
        for kd in WIDTHS:
            for rows in ROWS:
                for tile in [None, *TILES] if tiles else [None]:
                    if tile is None or tile.values >= LAYOUTS[layout].block:
                        yield Case(layout, rows, kd, tile)


def measure(case: Case, roof: float, budget_ms: float) -> dict[str, Any]:
    """One row. A wrong result gives its name and no time."""
    tile = "" if case.tile is None else f"{case.tile.values}x{case.tile.warps}"
    head = {"what": "quantize", "layout": case.layout, "R": case.rows, "Kd": case.kd, "tile": tile}
    inputs = [torch.randn(case.rows, case.kd, device="cuda", dtype=torch.bfloat16) for _ in range(case.rotation)]
    _poison()
    why = case.wrong(inputs[0])
    if why:
        return {**head, "ok": f"WRONG: {why}"}
    moved = inputs[0].nbytes + sum(t.nbytes for t in case.call(inputs[0])() if t is not None)
    timed = time_calls([case.call(x) for x in inputs], budget_ms)
    floor = moved / roof / 1e3
    return {
        **head,
        "ok": "yes",
        **{f"us_p{p}": f"{getattr(timed, f'us_p{p}'):.2f}" for p in (20, 50, 80)},
        "gb_per_s": f"{moved / timed.us_p50 / 1e3:.0f}",
        "bytes": moved,
        "floor_us": f"{floor:.2f}",
        "ratio_to_floor": f"{timed.us_p50 / max(floor, 1e-3):.1f}",
        "n": timed.n,
        "method": timed.method,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Timings of the activation quantisers; writes activation_timings.csv.")
    parser.add_argument("--out", type=Path, required=True, help="folder for activation_timings.csv")
    parser.add_argument("--budget-ms", type=float, default=10.0)
    parser.add_argument("--only", default=",".join(LAYOUTS), help="layouts to time, by name")
    parser.add_argument("--tiles", action="store_true", help="also time every tile")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise LabError("activation_timings needs a CUDA GPU; torch sees none.")
    unknown = set(args.only.split(",")) - set(LAYOUTS)
    if unknown:
        raise LabError(f"no layout is called {', '.join(sorted(unknown))}; known: {', '.join(LAYOUTS)}.")
    args.out.mkdir(parents=True, exist_ok=True)
    begin, where, wrong = time.perf_counter(), measured_on(), 0
    roof = bandwidth_gb_per_s()["copy"]
    with (args.out / "activation_timings.csv").open("w", newline="") as f:
        table = csv.DictWriter(f, COLUMNS)
        table.writeheader()
        for case in cases(args.only.split(","), args.tiles):
            row = measure(case, roof, args.budget_ms)
            table.writerow({**row, **where})
            f.flush()
            wrong += row["ok"].startswith("WRONG")
            cells = (row.get(c, "") for c in ("us_p20", "us_p50", "us_p80", "gb_per_s", "floor_us"))
            label = f"{case.layout:6} R={case.rows:<5} Kd={case.kd:<5} {row['tile']:7}"
            print(f"{label} {row['ok']:6}", *(f"{c:>8}" for c in cells), flush=True)
    print(f"{where['device']}, copy {roof:.0f} GB/s; {time.perf_counter() - begin:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
