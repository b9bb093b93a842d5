"""Timings of decoding weights with separate scales on a CUDA GPU: FP8 blocks, NVFP4, MXFP4, MXFP8, INT4/INT8 groups.

    PYTHONPATH=.:kernels python benchmarks/scaled_decode_timings.py --out DIR [--only mxfp8,..] [--tiles]

Tensors of 2^29 values (1 GiB of bf16 out). Before anything is timed the kernel's output for fresh, genuinely quantised
weights is compared bit for bit with the torch reference on the same GPU, and a slice of it with the reference on the
CPU; codes made on the GPU are compared with the CPU's. A wrong result has no time. Bytes counted: codes, scales and
global scales in, floats out; `share_of_copy` is over the copy bandwidth measured in the same run (target 0.8 for bf16).
`--tiles` times other tiles beside the shipped one.
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
from moe_lab.formats import FORMATS, QuantTensor
from moe_lab.formats.transposed import TransposedTensor
from moe_lab_kernels.dequantize.scaled import Tile, dequantize_scaled, dequantize_scaled_ref, tile_for
from moe_lab_kernels.dequantize.transposed import TILE, TransposedTile, dequantize_transposed

TARGET_SHARE = 0.8
MAIN = (16, 8192, 4096)  # experts, N, Kd: 2^29 values
SHAPES = {"E16-N8192-K4096": MAIN, "E36-N2048-K7168": (36, 2048, 7168), "E128-N2048-K2048": (128, 2048, 2048),
          "E340-N2048-K768": (340, 2048, 768)}  # fmt: skip
FORMAT_NAMES = ("fp8_block", "nvfp4_modelopt", "nvfp4_ct", "mxfp4_oss", "mxfp8", "int4_g64", "int8_g64")
TILES = [
    Tile(4096, 4), Tile(4096, 8), Tile(2048, 2), Tile(2048, 4), Tile(2048, 8), Tile(1024, 1), Tile(1024, 4),
    Tile(4096, 4, 2), Tile(1024, 4, 4), Tile(256, 4, 16),
]  # fmt: skip
TRANSPOSED_TILES = [
    TransposedTile(8, 256, 4), TransposedTile(8, 256, 1), TransposedTile(4, 1024, 4), TransposedTile(8, 1024, 4),
    TransposedTile(4, 512, 2), TransposedTile(8, 512, 2), TransposedTile(4, 2048, 8), TransposedTile(2, 2048, 8),
]  # fmt: skip
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TIMED = ("us_p20", "us_p50", "us_p80", "bytes", "gb_per_s", "share_of_copy", "target_share", "n", "method")
WHERE = ("copy_gb_per_s", "device", "driver", "torch", "triton", "commit")
COLUMNS = ["what", "format", "layout", "shape", "out", "tile", "ok", *TIMED, *WHERE]


@dataclass(frozen=True, slots=True)
class Case:
    """One decode (or encode): what identifies it, the call, its check (None: right), the bytes it moves."""

    labels: dict[str, str]
    call: Callable[[], torch.Tensor]
    wrong: Callable[[torch.Tensor], str | None]
    bytes: int
    target: float | None = None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits; expert by expert, so that the comparison needs no third tensor of that size."""
    kind = {4: torch.int32, 2: torch.int16, 1: torch.int8}[a.element_size()]
    pairs = zip(a.unbind(0), b.unbind(0), strict=True)
    return a.shape == b.shape and all(torch.equal(x.view(kind), y.view(kind)) for x, y in pairs)


def _weights(shape: tuple[int, int, int], format: str) -> QuantTensor:
    """Heavy-tailed weights, quantised on the GPU a few experts at a time."""
    codec, made = FORMATS[format], []
    for _ in range(shape[0]):
        w = torch.randn(1, *shape[1:], device="cuda") * (1 + 2 * torch.rand(1, *shape[1:], device="cuda") ** 8)
        made.append(QuantTensor.encode((w / shape[-1] ** 0.5).bfloat16(), codec))
    parts = {name: torch.cat([q.tensors[name] for q in made]) for name in made[0].tensors}
    named = (parts["data"], parts["scales"], parts.get("global_scale"))
    return QuantTensor.from_parts(*named, codec, shape, biases=parts.get("biases"))


def _second(q: QuantTensor) -> torch.Tensor | None:
    return q.biases if q.biases is not None else q.global_scale


def _reference(q: QuantTensor, dtype: torch.dtype) -> torch.Tensor:
    assert q.scales is not None
    return dequantize_scaled_ref(q.data, q.scales, q.format, q.shape[-1], second=_second(q), out_dtype=dtype)


def plain_case(q: QuantTensor, shape: str, dtype: torch.dtype, tile: Tile | None = None) -> Case:
    kd = q.shape[-1]
    assert q.scales is not None
    parts, more = (q.data, q.scales, q.format, kd), {"second": _second(q), "out_dtype": dtype}

    def wrong(y: torch.Tensor) -> str | None:
        for e in range(len(q)):
            if not _same(y[e : e + 1], _reference(q[e], dtype)[None]):
                return f"expert {e}"
        last = q[len(q) - 1].rows(slice(0, 128)).to("cpu")
        return None if _same(y[-1:, :128].cpu(), _reference(last, dtype)[None]) else "against the CPU"

    used = tile or tile_for(kd)
    labels = {"what": "decode", "format": q.format, "layout": "plain", "shape": shape, "out": str(dtype)[6:],
              "tile": f"{used.values}x{used.rows}/{used.warps}"}  # fmt: skip
    moved = q.nbytes + torch.Size(q.shape).numel() * dtype.itemsize
    target = TARGET_SHARE if dtype == BF16 and tile is None and q.shape == MAIN else None
    return Case(labels, lambda: dequantize_scaled(*parts, tile=tile, **more), wrong, moved, target)


def transposed_case(q: QuantTensor, shape: str, tile: TransposedTile | None = None) -> Case:
    t = TransposedTensor.of(q)

    def wrong(y: torch.Tensor) -> str | None:
        for e in range(len(q)):
            if not _same(y[e : e + 1], _reference(q[e], BF16).mT.contiguous()[None]):
                return f"expert {e}"
        return None

    used = tile or TILE
    labels = {"what": "decode", "format": q.format, "layout": "transposed", "shape": shape, "out": "bfloat16",
              "tile": f"{used.columns}x{used.pairs}/{used.warps}"}  # fmt: skip
    moved = t.nbytes + 2 * torch.Size(q.shape).numel()
    parts = (t.data, t.scales, t.format)
    call = lambda: dequantize_transposed(*parts, second=t.global_scale, tile=tile)  # noqa: E731
    return Case(labels, call, wrong, moved, None if tile else TARGET_SHARE)


def encode_case(format: str) -> Case:
    shape = (8, 2048, 4096)
    w = torch.randn(shape, device="cuda")
    w[0, :128, :128], w[1, 0, :256] = 0.0, 6e-38
    codec = FORMATS[format]

    def wrong(y: QuantTensor) -> str | None:
        want = QuantTensor.encode(w[:2].cpu(), codec)
        bad = [name for name, t in want.tensors.items() if not _same(y.tensors[name][:2].cpu(), t)]
        return ", ".join(bad) or None

    labels = {"what": "encode", "format": format, "layout": "plain", "shape": "E8-N2048-K4096", "out": "", "tile": ""}
    return Case(labels, lambda: QuantTensor.encode(w, codec), wrong, 4 * w.numel())  # type: ignore[arg-type,return-value]


def cases(only: list[str], tiles: bool) -> Iterator[Case]:
    for format in only:
        yield encode_case(format)
        for name, shape in SHAPES.items():
            q = _weights(shape, format)
            yield plain_case(q, name, BF16)
            if shape == MAIN:
                yield plain_case(q, name, F16)
                yield plain_case(q, name, F32)
                if format in ("nvfp4_modelopt", "nvfp4_ct", "mxfp4_oss"):
                    for other in (None, *(TRANSPOSED_TILES if tiles else ())):
                        yield transposed_case(q, name, other)
            if tiles and format in ("fp8_block", "nvfp4_modelopt", "mxfp4_oss"):
                for tile in TILES:
                    yield plain_case(q, name, BF16, tile)
            del q


def measure(case: Case, copy: float, budget_ms: float) -> dict[str, Any]:
    """One row. A wrong result gives its name and no time."""
    torch.full((1 << 28,), float("nan"), device="cuda")  # what the allocator hands to the next output
    why = case.wrong(case.call())
    if why:
        return {**case.labels, "ok": f"WRONG: {why}"}
    timed = time_calls([case.call], budget_ms, most=30)
    rate = case.bytes / timed.us_p50 / 1e3
    return {
        **case.labels,
        "ok": "yes" if case.target is None or rate / copy >= case.target else "slow",
        **{f"us_p{p}": f"{getattr(timed, f'us_p{p}'):.1f}" for p in (20, 50, 80)},
        "bytes": case.bytes,
        "gb_per_s": f"{rate:.0f}",
        "share_of_copy": f"{rate / copy:.3f}",
        "target_share": case.target or "",
        "n": timed.n,
        "method": timed.method,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Timings of scaled weight decoding; writes scaled_decode_timings.csv.")
    parser.add_argument("--out", type=Path, required=True, help="folder for scaled_decode_timings.csv")
    parser.add_argument("--budget-ms", type=float, default=30.0)
    parser.add_argument("--only", default=",".join(FORMAT_NAMES), help="formats to time, by name")
    parser.add_argument("--tiles", action="store_true", help="time other tiles too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise LabError("scaled_decode_timings needs a CUDA GPU; torch sees none.")
    args.out.mkdir(parents=True, exist_ok=True)
    begin, where, wrong = time.perf_counter(), measured_on(), 0
    copy = bandwidth_gb_per_s()["copy"]
    print(f"{where['device']}: copy {copy:.0f} GB/s", flush=True)
    with (args.out / "scaled_decode_timings.csv").open("w", newline="") as f:
        table = csv.DictWriter(f, COLUMNS)
        table.writeheader()
        for case in cases(args.only.split(","), args.tiles):
            row = measure(case, copy, args.budget_ms)
            table.writerow({**row, "copy_gb_per_s": f"{copy:.0f}", **where})
            f.flush()
            wrong += row["ok"].startswith("WRONG")
            widths = {"what": 6, "format": 14, "layout": 10, "shape": 17, "out": 8, "tile": 9, "ok": 5}
            head = " ".join(f"{row[name]:{width}}" for name, width in widths.items())
            cells = (row.get(c, "") for c in ("us_p20", "us_p50", "us_p80", "gb_per_s", "share_of_copy"))
            print(head, *(f"{c:>8}" for c in cells), flush=True)
    print(f"{time.perf_counter() - begin:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
