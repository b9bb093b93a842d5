"""What this machine can do at best, measured once for each device and driver and kept (`user_cache`).

A floor is the time below which no arm can be: the fewest bytes over the read bandwidth, or the arithmetic over the
matrix rate of the weights' kind, whichever is longer. A prediction adds what the arm itself says it moves and starts.
GB = 1e9 bytes, TFLOP/s = 1e12 multiply-or-adds.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from moe_lab.bench.runner import bandwidth_gb_per_s, time_calls
from moe_lab.errors import LabError
from moe_lab.formats import FORMATS, ScaledFormat
from moe_lab.system.devices import resolve_device
from moe_lab.system.environment import cpu_name, driver
from moe_lab.system.user_cache import cache_folder, read_json, slug, write_json

VERSION = 1
FP8_WEIGHTS = ("fp8_block", "mxfp8", "nvfp4_modelopt", "nvfp4_ct")
DENSE = {"f32": "fp32", "f16": "bf16", "bf16": "bf16"}


@dataclass(frozen=True, slots=True)
class Roof:
    """Ceilings of one device. `tflops`: matrix rates by arithmetic (fp32, bf16, fp8, int8; those that ran).
    `launch_us`: one more tiny dependent operation in a CUDA graph; `eager_us`: the same from Python."""

    device: str
    driver: str
    read_gb_per_s: float
    copy_gb_per_s: float
    launch_us: float
    eager_us: float
    tflops: dict[str, float]
    version: int = VERSION

    def rate(self, format: str) -> float:
        """TFLOP/s of the arithmetic for weights of this format; the best one where that was not measured."""
        return self.tflops.get(arithmetic_of(format), max(self.tflops.values()))

    def bound_ms(self, moved: float, flops: dict[str, float]) -> float:
        """The longer of moving `moved` bytes and computing `flops` (by format), in ms."""
        compute = sum(n / (1e9 * self.rate(format)) for format, n in flops.items())
        return max(moved / (1e6 * self.read_gb_per_s), compute)

    def predicted_ms(self, moved: float, flops: dict[str, float], launches: int, *, graph: bool) -> float:
        """The bound of what an arm moves itself, plus its launches one after another."""
        return self.bound_ms(moved, flops) + launches * (self.launch_us if graph else self.eager_us) / 1e3


def arithmetic_of(format: str) -> str:
    """The fastest arithmetic that serves weights of this format: what a floor assumes."""
    if format in DENSE:
        return DENSE[format]
    known = FORMATS.get(format)
    if format in FP8_WEIGHTS:
        return "fp8"
    return "bf16" if known is None or isinstance(known, ScaledFormat) else "int8"


def roof(device: torch.device | str = "cpu", *, again: bool = False) -> Roof:
    """The stored roof of a device, measured now where there is none (a second or two) or `again` is True."""
    where = resolve_device(device)
    name, version = (torch.cuda.get_device_name(where), driver()) if where.type == "cuda" else (cpu_name(), "none")
    threads = () if where.type == "cuda" else (f"{torch.get_num_threads()} threads",)
    path = cache_folder() / "roof" / f"{slug(name, version, *threads)}.json"
    stored = None if again else read_json(path)
    if stored is not None and stored.get("version") == VERSION:
        return _parsed(stored, str(path))
    with torch.no_grad():
        found = _cuda_roof(name, version) if where.type == "cuda" else _cpu_roof(name)
    write_json(path, asdict(found))
    return found


def _parsed(stored: dict[str, Any], path: str) -> Roof:
    missing = [f.name for f in fields(Roof) if f.name not in stored]
    if missing:
        raise LabError(f"{path} is no roof: it lacks {', '.join(missing)}. Delete it, or measure again with --tune.")
    return Roof(**{f.name: stored[f.name] for f in fields(Roof)})


def _cpu_roof(name: str) -> Roof:
    big = torch.rand(2**26)  # 256 MiB: larger than any cache
    target, a, b, tiny = torch.empty_like(big), torch.rand(768, 768), torch.rand(768, 768), torch.zeros(8)
    read, copy = _best_s(lambda: torch.sum(big)), _best_s(lambda: torch.neg(big, out=target))
    matrix, eager = _best_s(lambda: torch.mm(a, b)), _best_s(lambda: [tiny.add_(1) for _ in range(1000)]) / 1000
    rate = 2 * 768**3 / matrix / 1e12
    gb = 4e-9 * len(big)
    return Roof(name, "none", gb / read, 2 * gb / copy, eager * 1e6, eager * 1e6, {"fp32": rate})


def _best_s(run: Callable[[], Any], times: int = 5) -> float:
    spans = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        run()
        spans.append(time.perf_counter() - begin)
    return min(spans[1:])


def _cuda_roof(name: str, version: str) -> Roof:
    bandwidth = bandwidth_gb_per_s()
    tiny = torch.zeros(8, device="cuda")
    launch = time_calls([lambda: tiny.add_(1)] * 256).us_p50
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(2000):
        tiny.add_(1)
    torch.cuda.synchronize()
    eager = (time.perf_counter() - begin) / 2000
    rates = {kind: rate for kind in ("fp32", "bf16", "fp8", "int8") if (rate := _matrix_rate(kind)) is not None}
    return Roof(name, version, bandwidth["read"], bandwidth["copy"], launch, eager * 1e6, rates)


def _matrix_rate(kind: str, n: int = 8192) -> float | None:
    """TFLOP/s of an n^3 product through torch, None where this torch or device has none of that kind."""
    n = n // 2 if kind == "fp32" else n
    a, b = torch.randn(n, n, device="cuda"), torch.randn(n, n, device="cuda")
    ones = torch.ones(n, 1, device="cuda")
    calls: dict[str, Callable[[], Any]] = {"fp32": lambda: torch.mm(a, b)}
    try:
        if kind == "bf16":
            a16, b16 = a.bfloat16(), b.bfloat16()
            calls[kind] = lambda: torch.mm(a16, b16)
        elif kind == "fp8":
            a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
            calls[kind] = lambda: torch.ops.aten._scaled_mm(a8, b8, ones, ones.T, out_dtype=torch.bfloat16)
        elif kind == "int8":
            ai, bi = (a * 32).to(torch.int8), (b * 32).to(torch.int8).T
            calls[kind] = lambda: torch.ops.aten._int_mm(ai, bi)
        us = time_calls([calls[kind]], budget_ms=40.0, most=15).us_p50
    except (RuntimeError, AttributeError):
        return None
    return 2 * n**3 / us / 1e6
