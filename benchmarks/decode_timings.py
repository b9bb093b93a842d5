"""Timings of decoding on a CUDA GPU: raw and planar blocks to bf16, and repacking, beside the bandwidth of a copy.

    PYTHONPATH=.:kernels python benchmarks/decode_timings.py --out DIR [--formats q2_k,..] [--values N] [--sweep]

A tensor holds `--values` weights of random bytes: 1 GB of bf16 comes out by default, whatever goes in. Before anything
is timed the kernel writes into a poisoned output that is compared with the torch reference bit for bit, all of it; a
wrong result has no time. A call is one node of a CUDA graph; each reads and writes far more than any cache holds.
`gb_per_s` counts the bytes of the blocks read and of what is written; `copy_share` divides by what a copy moves,
measured in the same run. `--sweep` times other cuts of the programs too (column `cut`: runs of eight values, warps).
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
from moe_lab_kernels.dequantize import dequantize as dq
from moe_lab_kernels.dequantize import planar as dp
from moe_lab_kernels.storage import planar
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.planar_layout import PIECES

TARGET_SHARE = 0.8
TARGETS = ("q2_k", "q3_k", "q4_k", "q6_k", "q8_0", "mxfp4", "nvfp4")
SWEEP = [dq.Cut(runs, warps) for runs in (512, 1024, 2048) for warps in (2, 4, 8)]
TIMED = ("us_p20", "us_p50", "us_p80", "bytes", "gb_per_s", "copy_share", "n", "method")
COLUMNS = ["what", "format", "cut", "values", "ok", *TIMED, "copy_gb_per_s", "device", "driver", "torch", "triton",
           "commit"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one tensor: `call` writes `out`; `want` gives rows a..b of what it should hold."""

    what: str
    format: str
    cut: str
    bytes: int
    call: Callable[[], Any]
    out: torch.Tensor
    want: Callable[[int, int], torch.Tensor]


def random_rows(format: str, values: int) -> torch.Tensor:
    """uint8 [values / 4096, row_bytes]."""
    block = BLOCKS[format]
    return torch.randint(256, (values // 4096, 4096 // block.values * block.bytes), dtype=torch.uint8, device="cuda")


def wrong(case: Case) -> str | None:
    """Run once into poison and compare; None: right."""
    rows = max(1, (1 << 26) * len(case.out) // case.out.numel())
    integers = torch.int16 if case.out.element_size() == 2 else torch.uint8
    case.out.view(integers).fill_(77)
    case.call()
    for first in range(0, len(case.out), rows):
        got, want = case.out[first : first + rows], case.want(first, first + rows)
        same = got.view(integers) == want.view(integers)
        if got.is_floating_point():
            same |= got.isnan() & want.isnan()
        if not bool(same.all()):
            return f"{int((~same).sum())} of {same.numel()} differ in rows {first}.."
    return None


def raw_cases(format: str, values: int, cuts: list[dq.Cut]) -> Iterator[Case]:
    """Raw blocks to bf16."""
    raw = random_rows(format, values)
    out = torch.empty(len(raw), 4096, dtype=torch.bfloat16, device="cuda")
    for cut in cuts:
        yield Case(
            "raw", format, f"{cut.runs}x{cut.warps}", raw.numel() + 2 * values,
            lambda cut=cut: dq.dequantize(raw, format, out=out, cut=cut),
            out, lambda a, b: dq.dequantize_ref(raw[a:b], format, torch.bfloat16),
        )  # fmt: skip


def planar_cases(format: str, values: int, cuts: list[dq.Cut]) -> Iterator[Case]:
    """Planes to bf16, and raw blocks to planes and back: one weight of all rows."""
    raw = random_rows(format, values)
    n = len(raw)
    packed = planar.repack_ref(raw, format)
    out = torch.empty(n, 4096, dtype=torch.bfloat16, device="cuda")
    for cut in cuts:
        yield Case(
            "planar", format, f"{cut.runs}x{cut.warps}", raw.numel() + 2 * values,
            lambda cut=cut: dp.dequantize_planar(packed, format, n, 4096, out=out, cut=cut),
            out, lambda a, b: dq.dequantize_ref(raw[a:b], format, torch.bfloat16),
        )  # fmt: skip
    again = torch.empty_like(packed)
    yield Case(
        "repack", format, "", 2 * raw.numel(), lambda: planar.repack(raw, format, out=again), again,
        lambda a, b: packed[a:b],
    )  # fmt: skip
    back = torch.empty_like(raw)
    yield Case(
        "restore", format, "", 2 * raw.numel(), lambda: planar.restore(packed, format, n, 4096, out=back), back,
        lambda a, b: raw[a:b],
    )  # fmt: skip


def cases(format: str, values: int, cuts: list[dq.Cut]) -> Iterator[Case]:
    """A format's raw form, then its planar one."""
    yield from raw_cases(format, values, cuts)
    if format in PIECES:
        yield from planar_cases(format, values, cuts)


def measure(case: Case, values: int, copy: float, budget_ms: float) -> dict[str, Any]:
    """One row. A wrong result gives its place and no time."""
    head = {"what": case.what, "format": case.format, "cut": case.cut, "values": values, "copy_gb_per_s": f"{copy:.0f}"}
    why = wrong(case)
    if why:
        return {**head, "ok": f"WRONG: {why}"}
    timed = time_calls([case.call], budget_ms)
    rate = case.bytes / timed.us_p50 / 1e3
    slow = case.format in TARGETS and case.what in ("raw", "planar") and rate < TARGET_SHARE * copy
    return {
        **head,
        "ok": "slow" if slow else "yes",
        **{f"us_p{p}": f"{getattr(timed, f'us_p{p}'):.1f}" for p in (20, 50, 80)},
        "bytes": case.bytes,
        "gb_per_s": f"{rate:.0f}",
        "copy_share": f"{rate / copy:.3f}",
        "n": timed.n,
        "method": timed.method,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Timings of block decoding; writes decode_timings.csv.")
    parser.add_argument("--out", type=Path, required=True, help="folder for decode_timings.csv")
    parser.add_argument("--formats", default=",".join(dict.fromkeys((*TARGETS, *BLOCKS))))
    parser.add_argument("--values", type=int, default=1 << 29, help="weights a tensor, a multiple of 4096")
    parser.add_argument("--budget-ms", type=float, default=20.0)
    parser.add_argument("--sweep", action="store_true", help="time other cuts of the programs too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise LabError("decode_timings needs a CUDA GPU; torch sees none.")
    args.out.mkdir(parents=True, exist_ok=True)
    begin, where, failed = time.perf_counter(), measured_on(), 0
    copy = bandwidth_gb_per_s()["copy"]
    with (args.out / "decode_timings.csv").open("w", newline="") as f:
        table = csv.DictWriter(f, COLUMNS)
        table.writeheader()
        for format in args.formats.split(","):
            for case in cases(format, args.values, SWEEP if args.sweep else [dq.CUT_CUDA]):
                row = measure(case, args.values, copy, args.budget_ms)
                table.writerow({**row, **where})
                f.flush()
                failed += row["ok"].startswith("WRONG")
                cells = (row.get(c, "") for c in ("us_p20", "us_p50", "us_p80", "gb_per_s", "copy_share"))
                print(f"{case.what:8} {format:7} {case.cut:8} {row['ok']:6}", *(f"{c:>9}" for c in cells), flush=True)
    print(f"{where['device']}, copy {copy:.0f} GB/s; {time.perf_counter() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
