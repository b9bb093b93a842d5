"""What is launched around the arms: routers of every family, plans and slot tables, rows, sums, decoded weights."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from moe_lab.arms.grouped import weight_of
from moe_lab.families import FAMILIES
from moe_lab.spec import RouterSpec
from moe_lab_kernels.dequantize import dequantize, planar, scaled, transposed
from moe_lab_kernels.route import plan, route_plan, router, router_settings, topk
from moe_lab_kernels.rows import activation, arithmetic, combine, quantize_fp8, quantize_rows, shared_gate
from moe_lab_kernels.slots import route_table, slot_table
from moe_lab_kernels.storage import planar as planes
from moe_lab_kernels.storage import scaled_layouts
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.planar_layout import PIECES
from tools.variants.arms import D, F, weights

Call = tuple[str, Callable[[], Any]]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SIZES: dict[str, dict[str, Any]] = {  # of families whose router is not one of 128 experts and 8 picks; all have one
    "mixtral": {"num_experts": 8, "top_k": 2},
    "gpt_oss": {"num_experts": 128, "top_k": 4},
    "deepseek_v2": {"num_experts": 160, "top_k": 6, "n_group": 8, "topk_group": 3},
    "deepseek_v3": {"num_experts": 256, "top_k": 8, "n_group": 8, "topk_group": 4},
    "deepseek_v4": {"num_experts": 384, "top_k": 6},
    "longcat_flash": {"num_experts": 512, "top_k": 12, "zero_experts": 256},
    "llama4": {"num_experts": 128, "top_k": 1},
    "phimoe": {"num_experts": 16, "top_k": 2},
}
STEPS, ROWS = (1, 8), 600  # tokens of a decode step, and of a prefill
PLANS = (1, 64, 8192)


def calls() -> Iterator[Call]:
    """(what it is for, a call of the launcher)."""
    yield from _routers()
    yield from _plans()
    yield from _rows()
    yield from _sums()
    yield from _decoded()


def _routers() -> Iterator[Call]:
    """Logits, picks, and picks with their plan or slots: of each family once, and rows of several dtypes."""
    for (x, w), t in itertools.product(((BF16, BF16), (BF16, F32), (F32, F32)), (1, 64, ROWS, 4096)):
        yield "router", partial(router.router, torch.empty(t, 2048, dtype=x), torch.empty(128, 2048, dtype=w))
    for name, family in FAMILIES.items():
        sizes = {"num_experts": 128, "top_k": 8} | SIZES.get(name, {})
        spec = RouterSpec(**{**family.router, **sizes})
        if router_settings.unserved(spec) is not None:
            continue
        given: dict[str, Any] = {}
        if family.layer.get("correction_bias"):
            given["correction_bias"] = torch.empty(spec.width)
        if family.layer.get("per_expert_scale"):
            given["per_expert_scale"] = torch.empty(spec.num_experts)
        yield name, partial(topk.topk, torch.empty(ROWS, spec.width), spec, **given)
        slot_of, owner = torch.empty(spec.num_experts, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
        one, eight = (torch.empty(t, spec.width) for t in STEPS)
        if route_plan.unserved(eight, spec) is None:
            yield name, partial(route_plan.route_plan, eight, spec, **given)
            yield name, partial(route_table.route_table, one, spec, slot_of, owner, **given)


def _plans() -> Iterator[Call]:
    for t in PLANS:
        ids, w = torch.empty(t, 8, dtype=torch.int32), torch.empty(t, 8)
        yield "plan", partial(plan.plan, ids, w, 128)
    ends = torch.empty(128, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    for t, everyone in itertools.product(STEPS, (False, True)):
        ids, w, affected = torch.empty(t, 8, dtype=torch.int32), torch.empty(t, 8), torch.empty(t, dtype=torch.int32)
        yield "slot table", partial(slot_table.slot_table, ids, w, affected, *ends, everyone=everyone)


def _rows() -> Iterator[Call]:
    """Activations: what `lab.quantize_activations` makes of them."""
    for layout, dtype, t in itertools.product(("q8_1", "d4", "ds4", "d2s6", "q8_k"), (BF16, F16, F32), (1, ROWS)):
        yield "activations", partial(quantize_rows.quantize_int8, torch.empty(t, D, dtype=dtype), layout)
    safe = arithmetic.Arithmetic(safe_sum=True, rounding="divide_even")
    power = arithmetic.Arithmetic(scale_dtype="e8m0")
    yield "activations, other choices", partial(quantize_rows.quantize_int8, torch.empty(8, D), "d2s6", safe)
    yield "activations, other choices", partial(quantize_fp8.quantize_fp8, torch.empty(8, D), power, floor=1e-4)
    for dtype, t in itertools.product((BF16, F16, F32), (1, ROWS)):
        yield "activations", partial(quantize_fp8.quantize_fp8, torch.empty(t, D, dtype=dtype))
        g, u = torch.empty(t, F, dtype=dtype), torch.empty(t, F, dtype=dtype)
        for op, limit in itertools.product((activation.swiglu, activation.geglu), (None, 7.0)):
            yield "hidden rows", partial(op, g, u, limit=limit)


def _sums() -> Iterator[Call]:
    for dtype, out in ((BF16, BF16), (F16, F16), (F32, F32), (F32, BF16)):
        y, w, ids = torch.empty(8, 8, D, dtype=dtype), torch.empty(8, 8), torch.empty(8, 8, dtype=torch.int32)
        beside, gate = torch.empty(8, D, dtype=dtype), torch.empty(8)
        for more, order in itertools.product((False, True), (None, ids)):
            given = (beside, gate) if more else ()
            yield "weighted sum", partial(combine.combine, y, w, *given, out_dtype=out, ids=ids, order=order, pdl=True)
        yield "shared gate", partial(shared_gate.shared_gate, torch.empty(8, D, dtype=dtype), torch.empty(D))


def _decoded() -> Iterator[Call]:
    """Stored weights to values, and to other layouts: to the dtypes of products, and to fp32 for the references."""
    for dtype in (BF16, F16, F32):
        for format, block in BLOCKS.items():
            raw = torch.empty(4, D // block.values * block.bytes, dtype=torch.uint8)
            yield "weights", partial(dequantize.dequantize, raw, format, dtype)
            if format in PIECES:
                packed = torch.empty(2, raw.numel(), dtype=torch.uint8)
                yield "planes", partial(planar.dequantize_planar, packed, format, 4, D, dtype)
        for format in scaled_layouts.LAYOUTS:
            w = weight_of(weights(format, 2, 128, D))
            assert w.scales is not None
            yield "weights", partial(scaled.dequantize_scaled, w.data, w.scales, format, D, second=w.second,
                                     out_dtype=dtype)  # fmt: skip
            if scaled_layouts.layout_of(format).code == "e2m1":
                turned = w.data.mT.contiguous(), w.scales.mT.contiguous()
                yield "weights, transposed", partial(transposed.dequantize_transposed, *turned, format,
                                                     second=w.second, out_dtype=dtype)  # fmt: skip
    for format in PIECES:
        raw = torch.empty(2, 4, D // BLOCKS[format].values * BLOCKS[format].bytes, dtype=torch.uint8)
        yield "planes", partial(planes.repack, raw, format)
        yield "planes", partial(planes.restore, torch.empty(2, raw[0].numel(), dtype=torch.uint8), format, 4, D)
