"""Compile every kernel, as its launcher would call it, for a Hopper GPU on a machine that has none.

Run as a script in a process of its own (without TRITON_INTERPRET): prints one JSON object, variant -> facts read off
the PTX. The launchers run as they are; only the last step, starting the kernel, is replaced.
"""

import json
import os
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from moe_lab_kernels import (
    activation,
    backend,
    combine,
    decode_ref,
    gemv,
    plan,
    primitives,
    quantize_rows,
    route_plan,
    router,
    topk,
)
from moe_lab_kernels.backend import jit, tl
from tests.support.routing_cases import ROUTERS, vectors


class Hopper:
    """What the compiler asks of a driver."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


@jit
def _dot_kernel(a, b, out):
    """Stands for a kernel that uses the shared `dot`."""
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    tl.store(out + at, primitives.dot(tl.load(a + at), tl.load(b + at)))


def facts(compiled) -> dict:
    ptx = compiled.asm["ptx"]
    return {
        "target": re.search(r"\.target\s+(\w+)", ptx).group(1),
        "fused": len(re.findall(r"\bfma\.rn\.f32", ptx)),
        # float64 exp looks at its argument's high word as if it were fp32; float64 reciprocals start from a rough one
        "flushes": "ftz" in re.sub(r"ex2\.approx\.ftz|abs\.ftz|rcp\.approx\.ftz\.f64", "", ptx),
        "rough_division": "div.full" in ptx or "div.approx" in ptx,
        "dp4a": ptx.count("dp4a.s32"),
        "tf32": "tf32" in ptx,
        "conversions": compiled.asm["ttgir"].count("ttg.convert_layout"),
        "mma": sorted(set(re.findall(r"\b(wgmma|mma\.sync)", ptx))),
        "barriers": len(re.findall(r"\bbar\.sync", ptx)),
        "cubin": len(compiled.asm["cubin"]),
    }


def gemv_call(format, dtype, max_rows, *, two=False, scatter=False, kd=512, n=60):
    codes, scale = torch.zeros(8, kd, dtype=torch.int8), torch.zeros(8, kd // 32, dtype=torch.float16)
    w, out = torch.zeros(2, n, decode_ref.row_bytes(format, kd), dtype=torch.uint8), torch.zeros(8, n, dtype=dtype)
    row = torch.zeros(8, dtype=torch.int32)
    second = {"w2": w.clone(), "out2": out.clone()} if two else {}
    gemv.gemv((codes, scale), row, w, torch.zeros(3, 3, dtype=torch.int32), format, out, max_rows=max_rows,
              out_row=row if scatter else None, **second)  # fmt: skip


def routing_variants():
    for name in ("R128-K8-normalised", "R256-K8-top2-groups-bias", "R384-K6-sqrt-softplus-bias",
                 "R768-K12-zero-experts-bias", "R257-K16-softcap-temperature"):  # fmt: skip
        spec, more = ROUTERS[name][0], vectors(name)
        yield f"topk-{name}", lambda spec=spec, more=more: topk.topk(torch.ones(4, spec.width), spec, **more)
    spec = ROUTERS["R128-K8-normalised"][0]
    yield "topk-bf16", lambda: topk.topk(torch.ones(4, 128, dtype=torch.bfloat16), spec)
    for t in (1, 8):
        yield f"route_plan-T{t}", lambda t=t: route_plan.route_plan(torch.ones(t, 128), spec)
    for t in (1, 8192):
        ids, w = torch.zeros(t, 8, dtype=torch.int32), torch.ones(t, 8)
        yield f"plan-T{t}", lambda ids=ids, w=w: plan.plan(ids, w, 128)
    for t, dtype in ((1, torch.bfloat16), (300, torch.bfloat16), (3000, torch.bfloat16), (3000, torch.float32)):
        x, w = torch.ones(t, 600, dtype=dtype), torch.ones(60, 600, dtype=dtype)
        yield f"router-T{t}-{str(dtype).removeprefix('torch.')}", lambda x=x, w=w: router.router(x, w)


def variants():
    yield from routing_variants()
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    yield "gemv-q2_k-bf16-rows8-two", lambda: gemv_call("q2_k", bf16, 8, two=True, kd=2304)
    yield "gemv-q2_k-f16-rows1", lambda: gemv_call("q2_k", f16, 1)
    yield "gemv-q3_k-bf16-rows8-scatter", lambda: gemv_call("q3_k", bf16, 8, scatter=True, kd=2304)
    yield "gemv-q8_0-f32-rows8", lambda: gemv_call("q8_0", f32, 8)
    for dtype in (f32, f16, bf16):
        name = str(dtype).removeprefix("torch.")
        yield f"quantize-{name}", lambda dtype=dtype: quantize_rows.quantize_q8_1(torch.ones(2, 96, dtype=dtype))
    strided = torch.ones(704, 8, dtype=bf16).t()
    yield "swiglu-f32", lambda: activation.swiglu(torch.ones(8, 704), torch.ones(8, 704))
    yield "swiglu-bf16-limit-strided", lambda: activation.swiglu(strided, strided, limit=7.0)
    yield "geglu-bf16", lambda: activation.geglu(torch.ones(8, 704, dtype=bf16), torch.ones(8, 704, dtype=bf16))
    y, w, ids = torch.ones(4, 3, 200, dtype=bf16), torch.ones(4, 3), torch.zeros(4, 3, dtype=torch.int32)
    yield "combine-bf16", lambda: combine.combine(y, w)
    yield "combine-bf16-everything", lambda: combine.combine(y, w, y[:, 0], w[:, 0], ids=ids, order=ids, out_dtype=f32)
    square = torch.ones(16, 16)
    yield "dot-f32", lambda: backend.launch(_dot_kernel, (1,), square, square, square, device=square.device)


def main() -> None:
    driver.set_active(Hopper())
    compiled = []

    def compile_only(kernel, grid, *args, device, **meta):
        compiled.append(kernel.warmup(*args, grid=grid, enable_fp_fusion=False, **meta))

    backend.launch, backend.serve = compile_only, lambda op, *_, **tensors: "cuda"
    out = {"triton": triton.__version__, "variants": {}}
    wanted = sys.argv[1:]
    for name, call in variants():
        if wanted and not any(w in name for w in wanted):
            continue
        first = len(compiled)
        call()
        for i, kernel in enumerate(compiled[first:]):
            out["variants"][name if i == 0 else f"{name}-{i}"] = facts(kernel)
    backend.has_dp4a = lambda on: False
    gemv_call("q2_k", torch.float32, 1)
    out["variants"]["gemv-q2_k-f32-rows1-twin"] = facts(compiled[-1])
    print(json.dumps(out))


if __name__ == "__main__":
    assert not backend.INTERPRETED, f"unset TRITON_INTERPRET (it is {os.environ.get('TRITON_INTERPRET')!r}) to compile"
    main()
