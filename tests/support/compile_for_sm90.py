"""Compile kernels of every kind, as their launchers would call them, for a Hopper GPU on a machine that has none.

Run as a script in a process of its own (without TRITON_INTERPRET): prints one JSON object, variant -> facts read off
the PTX. Registers and spills of all variants: `tools.variants`.
"""

import json
import os
import sys

import torch
import triton

from moe_lab_kernels import backend, primitives
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.dequantize import dequantize
from moe_lab_kernels.dequantize import planar as dequantize_planar
from moe_lab_kernels.dequantize import scaled as dequantize_scaled
from moe_lab_kernels.dequantize import transposed as dequantize_transposed
from moe_lab_kernels.gemv import gemv
from moe_lab_kernels.gemv import mlp as gemv_mlp
from moe_lab_kernels.gemv.mlp_call import Experts
from moe_lab_kernels.launch.ahead import aim
from moe_lab_kernels.route import plan, route_plan, router, topk
from moe_lab_kernels.rows import activation, arithmetic, combine, quantize_fp8, quantize_rows, shared_gate
from moe_lab_kernels.slots import pointer_table, route_table, slot_table
from moe_lab_kernels.storage import blocks, planar, scaled_layouts
from moe_lab_kernels.storage.planar_layout import PIECES
from tests.support.routing_cases import ROUTERS, vectors
from tests.support.sm90 import compiled, facts


@jit
def _dot_kernel(a, b, out):
    """Stands for a kernel that uses the shared `dot`."""
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    tl.store(out + at, primitives.dot(tl.load(a + at), tl.load(b + at)))


def gemv_call(format, dtype, max_rows, *, two=False, scatter=False, addresses=False, planes=False, kd=512, n=60):
    codes, scale = torch.zeros(8, kd, dtype=torch.int8), torch.zeros(8, kd // 32, dtype=torch.float16)
    w, out = torch.zeros(2, n, blocks.gemv_row_bytes(format, kd), dtype=torch.uint8), torch.zeros(8, n, dtype=dtype)
    row = torch.zeros(8, dtype=torch.int32)
    w = planar.repack_ref(w, format)[:, None] if planes else pointer_table.PointerTable.of([w]) if addresses else w
    second = {"w2": w, "out2": out.clone()} if two else {}
    gemv.gemv((codes, scale), row, w, torch.zeros(3, 3, dtype=torch.int32), format, out, max_rows=max_rows,
              out_row=row if scatter else None, layout="planar" if planes else "raw", **second)  # fmt: skip


MLP_PAIRS, MLP_MANY = ("q2_k+q3_k", "mxfp4+mxfp4"), ("q2_k+q3_k",)


def mlp_call(pair, max_rows, d=2048, f=768):
    formats = pair.split("+")

    def raw(format, n, kd):
        return torch.zeros(2, n, blocks.gemv_row_bytes(format, kd), dtype=torch.uint8)

    gate, down, i = raw(formats[0], f, d), raw(formats[1], d, f), torch.zeros(8, dtype=torch.int32)
    x, y = (torch.zeros(n, d, dtype=torch.bfloat16) for n in (8, 8))
    table = torch.zeros(8, 3, dtype=torch.int32)
    gemv_mlp.gemv_mlp(x, i, Experts(gate, gate, down, *formats), table, y, i, max_rows=max_rows)


def mlp_variants():
    """The decode step's experts as an arm calls them. Only the second launch is theirs; the first is quantize-lanes."""
    for pair in MLP_PAIRS:
        yield f"mlp-{pair}-rows1", lambda pair=pair: mlp_call(pair, 1)
    for pair in MLP_MANY:
        yield f"mlp-{pair}-rows8", lambda pair=pair: mlp_call(pair, 8)


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
    for t, everyone in ((1, False), (8, True)):
        ids, w, count = torch.zeros(t, 8, dtype=torch.int32), torch.ones(t, 8), torch.zeros((), dtype=torch.int32)
        ends = (torch.zeros(128, dtype=torch.int32), torch.zeros(60, dtype=torch.int32))
        yield (
            f"slot_table-T{t}{'-everyone' if everyone else ''}",
            lambda ids=ids, w=w, count=count, ends=ends, everyone=everyone: slot_table.slot_table(
                ids, w, count, *ends, everyone=everyone
            ),
        )
        yield (
            f"route_table-T{t}{'-everyone' if everyone else ''}",
            lambda t=t, ends=ends, everyone=everyone: route_table.route_table(
                torch.ones(t, 128), spec, *ends, everyone=everyone
            ),
        )
    for t, dtype in ((1, torch.bfloat16), (300, torch.bfloat16), (3000, torch.bfloat16), (3000, torch.float32)):
        x, w = torch.ones(t, 600, dtype=dtype), torch.ones(60, 600, dtype=dtype)
        yield f"router-T{t}-{str(dtype).removeprefix('torch.')}", lambda x=x, w=w: router.router(x, w)


def decode_variants():
    for format, block in blocks.BLOCKS.items():
        raw = torch.zeros(4, 8 * block.bytes, dtype=torch.uint8)
        yield f"dequantize-{format}", lambda raw=raw, format=format: dequantize.dequantize(raw, format)
        if format in PIECES:
            packed, kd = planar.repack_ref(raw, format), 8 * block.values
            yield (
                f"dequantize-planar-{format}",
                lambda p=packed, format=format, kd=kd: dequantize_planar.dequantize_planar(p, format, 4, kd),
            )
    for format in ("q8_0", "q3_k", "q4_k"):  # one field a byte, eight, and 6-bit scales
        raw, kd = torch.zeros(4, 8 * blocks.BLOCKS[format].bytes, dtype=torch.uint8), 8 * blocks.BLOCKS[format].values
        packed = planar.repack_ref(raw, format)
        yield f"repack-{format}", lambda raw=raw, format=format: planar.repack(raw, format)
        yield f"restore-{format}", lambda p=packed, format=format, kd=kd: planar.restore(p, format, 4, kd)


def scaled_variants():
    def parts(format, n=128, kd=1024):
        layout, shape = scaled_layouts.layout_of(format), (2, n, kd)
        data = torch.zeros(2, n, scaled_layouts.row_bytes(format, kd), dtype=torch.uint8)
        dtype = torch.bfloat16 if layout.scale == "float" else torch.uint8
        scales = torch.ones(scaled_layouts.scale_shape(format, shape), dtype=dtype)
        second = {"none": None, "bias": scales}.get(layout.second, torch.ones(2))
        return data, scales, second

    for format in ("fp8_block", "nvfp4_modelopt", "nvfp4_ct", "mxfp4_oss", "mxfp8", "int4_g64", "int8_g64"):
        d, s, g = parts(format)
        yield f"scaled-{format}", lambda d=d, s=s, g=g, format=format: dequantize_scaled.dequantize_scaled(
            d, s, format, 1024, second=g)  # fmt: skip
        if scaled_layouts.layout_of(format).code == "e2m1":
            yield (
                f"transposed-{format}",
                lambda d=d, s=s, g=g, format=format: dequantize_transposed.dequantize_transposed(
                    d.mT.contiguous(), s.mT.contiguous(), format, second=g
                ),
            )


def quantize_variants():
    bf16, f32 = torch.bfloat16, torch.float32
    for dtype in (f32, torch.float16, bf16):
        name = str(dtype).removeprefix("torch.")
        yield f"quantize-{name}", lambda dtype=dtype: quantize_rows.quantize_q8_1(torch.ones(2, 96, dtype=dtype))
    few, many = torch.ones(1, 2304, dtype=bf16), torch.ones(256, 2304, dtype=bf16)
    for layout in ("d4", "ds4", "d2s6", "q8_k"):
        yield f"quantize-{layout}-few", lambda layout=layout: quantize_rows.quantize_int8(few, layout)
        yield f"quantize-{layout}-many", lambda layout=layout: quantize_rows.quantize_int8(many, layout)
    safe = arithmetic.Arithmetic(safe_sum=True, rounding="divide_even")
    yield "quantize-d2s6-safe-f32", lambda: quantize_rows.quantize_int8(torch.ones(2, 256), "d2s6", safe)
    power = arithmetic.Arithmetic(scale_dtype="e8m0")
    yield "quantize-fp8-many", lambda: quantize_fp8.quantize_fp8(many)
    yield "quantize-fp8-e8m0-f32", lambda: quantize_fp8.quantize_fp8(torch.ones(2, 256), power, floor=1e-4)


def variants():
    yield from routing_variants()
    yield from scaled_variants()
    yield from quantize_variants()
    yield from decode_variants()
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    yield "gemv-q2_k-bf16-rows8-two", lambda: gemv_call("q2_k", bf16, 8, two=True, kd=2304)
    yield "gemv-q2_k-f16-rows1", lambda: gemv_call("q2_k", f16, 1)
    yield "gemv-q2_k-f16-rows1-two-addresses", lambda: gemv_call("q2_k", f16, 1, two=True, addresses=True)
    yield "gemv-q3_k-bf16-rows8-scatter", lambda: gemv_call("q3_k", bf16, 8, scatter=True, kd=2304)
    yield "gemv-q8_0-f32-rows8", lambda: gemv_call("q8_0", f32, 8)
    yield "gemv-planar-q3_k-bf16-rows1", lambda: gemv_call("q3_k", bf16, 1, planes=True)
    yield from mlp_variants()
    strided = torch.ones(704, 8, dtype=bf16).t()
    yield "swiglu-f32", lambda: activation.swiglu(torch.ones(8, 704), torch.ones(8, 704))
    yield "swiglu-bf16-limit-strided", lambda: activation.swiglu(strided, strided, limit=7.0)
    yield "geglu-bf16", lambda: activation.geglu(torch.ones(8, 704, dtype=bf16), torch.ones(8, 704, dtype=bf16))
    y, w, ids = torch.ones(4, 3, 200, dtype=bf16), torch.ones(4, 3), torch.zeros(4, 3, dtype=torch.int32)
    yield "combine-bf16", lambda: combine.combine(y, w)
    yield "combine-bf16-everything", lambda: combine.combine(y, w, y[:, 0], w[:, 0], ids=ids, order=ids, out_dtype=f32)
    yield "shared_gate-bf16", lambda: shared_gate.shared_gate(torch.ones(4, 2304, dtype=bf16), torch.ones(2304))
    square = torch.ones(16, 16)
    yield "dot-f32", lambda: backend.launch(_dot_kernel, (1,), square, square, square, device=square.device)


def main() -> None:
    """Prints variant -> facts; of several launches of one call the later ones as variant-1 and so on."""
    aim()
    out, wanted = {"triton": triton.__version__, "variants": {}}, sys.argv[1:]
    for name, call in variants():
        if not wanted or any(w in name for w in wanted):
            for i, kernel in enumerate(compiled(call)):
                out["variants"][name if i == 0 else f"{name}-{i}"] = facts(kernel)
    backend.has_dp4a = lambda on: False
    out["variants"]["gemv-q2_k-f32-rows1-twin"] = facts(compiled(lambda: gemv_call("q2_k", torch.float32, 1))[-1])
    print(json.dumps(out))


if __name__ == "__main__":
    assert not backend.INTERPRETED, f"unset TRITON_INTERPRET (it is {os.environ.get('TRITON_INTERPRET')!r}) to compile"
    main()
