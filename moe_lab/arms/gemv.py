"""The decode arms: q8_1 activations and integer dots on ggml's blocks, rows as they come on every other format.

`gemv`: an expert's rows in chunks of at most 8 that share one read of its weights; prefill runs the same numbers as
decode. `per_token`: each token alone, its own submission, the same arithmetic row by row, so the same bits.
"""

from collections.abc import Sequence

import torch

from moe_lab._types import Tensor
from moe_lab.arms.base import ArmContext, activate, reads_only
from moe_lab.arms.by_layout import kernels_for
from moe_lab.arms.formula import gate_of
from moe_lab.arms.gemv_float import PairWork, is_plain, kernel_mlp, lacks_formula, meets, torch_mlp
from moe_lab.arms.lists import chunk_table, closed_up, numbers, shared_table
from moe_lab.arms.schedule import DeviceWork, Group, PlannedWork, Schedule
from moe_lab.arms.stack import ExpertStack
from moe_lab.formats import FORMATS
from moe_lab.formats.layouts import RAW
from moe_lab.spec import MoESpec
from moe_lab_kernels.gemv.mlp_call import Experts
from moe_lab_kernels.gemv_float.steps import WALKS


class Gemv:
    """Chunks of at most 8 rows, one weight read shared within a chunk."""

    name = "gemv"
    per_token = False
    layouts: tuple[str, ...] = (RAW, "planar", "tiles")

    def supports(self, formats: Sequence[str], backend: str) -> str | None:
        """Formats with a kernel; on the CPU also those of the user's that have an integer form."""
        missing = [f for f in formats if f not in WALKS]
        if not missing:
            return None
        if backend == "torch" and all(_has_integers(f) for f in missing):
            return None
        return f"it serves {', '.join(WALKS)}, not {', '.join(sorted(set(missing)))}"

    def lacks(self, spec: MoESpec) -> str | None:
        """Gated experts with a clamp, biases and the routing weight anywhere."""
        return lacks_formula(spec)

    def reads(self, layout: str, activation: str | None) -> str | None:
        """Planes and tiles with q8_1 rows alone."""
        if layout not in self.layouts:
            return reads_only(self.layouts, layout)
        return None if activation in (None, "q8_1") else f"experts in layout {layout!r} meet q8_1 rows alone"

    def meets(self, formats: Sequence[str], activation: str) -> str | None:
        """None when activations of this kind meet weights of all these formats, else why not."""
        return next((why for f in formats if (why := meets(f, activation)) is not None), None)

    def fuses(self, formats: Sequence[str]) -> str | None:
        """None when slots of these formats may be found by address, so that the shared expert can be one of them."""
        missing = sorted({f for f in formats if f not in WALKS})
        return f"{', '.join(missing)} slots are not found by address" if missing else None

    def experts(
        self, x: Tensor, stack: ExpertStack, schedule: Schedule, groups: Sequence[Group], y: Tensor, ctx: ArmContext
    ) -> None:
        """See `Arm.experts`."""
        first, last = groups[0].first, groups[-1].first + groups[-1].rows
        token, slot = schedule.token[first:last], schedule.slot[first:last]
        chunks = chunk_table(groups, stack.slot_of, first, ctx.chunk_rows)
        ctx.work.weight_bytes += len(chunks) * stack.expert_bytes
        weight = schedule.weight[first:last]
        if ctx.backend == "torch":
            local = [Group(g.expert, g.first - first, g.rows) for g in groups]
            y[token, slot] = torch_mlp(x, token, stack, local, ctx, weight).to(y.dtype)
            return
        table = torch.tensor(chunks, dtype=torch.int32, device=x.device).view(-1, 3)
        most = max((rows for _, _, rows in chunks), default=1)
        whose = None if stack.biases is None else _experts_of(groups, ctx.chunk_rows, x.device)
        to = token * y.shape[1] + slot
        self._mlp(PairWork(x, token, table, most, y.view(-1, y.shape[-1]), to, weight, whose), stack, ctx)

    def experts_on_device(self, x: Tensor, stack: ExpertStack, work: DeviceWork, y: Tensor, ctx: ArmContext) -> None:
        """See `ArmExtras.experts_on_device`."""
        out = y.view(-1, y.shape[-1])
        if ctx.backend != "torch":
            pairs = PairWork(x, work.token, work.chunks, work.most_rows, out, work.row, work.weight, work.expert)
            self._mlp(pairs, stack, ctx)
            return
        held = {slot: expert for expert, slot in stack.slot_of.items()}
        groups = [Group(held[s], first, rows) for s, first, rows in work.chunks.tolist() if s >= 0 and rows]
        if groups:
            pairs = [p for g in groups for p in range(g.first, g.first + g.rows)]
            made = torch_mlp(x, work.token[pairs].long(), stack, closed_up(groups), ctx, work.weight[pairs])
            out[work.row[pairs].long()] = made.to(y.dtype)

    def experts_of_plan(self, x: Tensor, stack: ExpertStack, plan: PlannedWork, y: Tensor, ctx: ArmContext) -> None:
        """See `ArmExtras.experts_of_plan`."""
        if ctx.backend != "torch":
            row = torch.add(plan.slot, plan.token, alpha=y.shape[1])
            chunks, out = plan.tiles(ctx.chunk_rows).tiles, y.view(-1, y.shape[-1])
            self._mlp(PairWork(x, plan.token, chunks, ctx.chunk_rows, out, row, plan.weight), stack, ctx)
            return
        known = plan.known()
        for groups in known.steps:
            made = torch_mlp(x, known.token, stack, groups, ctx, known.weight)
            y[known.token, known.slot] = made.to(y.dtype)

    def shared(self, x: Tensor, stack: ExpertStack, ctx: ArmContext) -> Tensor:
        """The shared expert over all rows: x [T, D] -> [T, D] of the stored dtype."""
        groups = [Group(0, 0, len(x))]
        chunks = chunk_table(groups, stack.slot_of, 0, ctx.chunk_rows)
        ctx.work.weight_bytes += len(chunks) * stack.expert_bytes
        if ctx.backend == "torch":
            return torch_mlp(x, torch.arange(len(x), device=x.device), stack, groups, ctx)
        rows = numbers(len(x), x.device)
        out = ctx.empty("shared rows", (len(x), stack.down.shape[1]), ctx.store_dtype, x.device)
        table = shared_table(len(x), ctx.chunk_rows, x.device)
        with ctx.phase("shared expert") as inner:
            return self._mlp(PairWork(x, rows, table, min(len(x), ctx.chunk_rows), out, rows), stack, inner)

    def _mlp(self, work: PairWork, stack: ExpertStack, ctx: ArmContext) -> Tensor:
        """The kernels' path for these formats and this formula."""
        return _kernel_mlp(work, stack, ctx) if is_plain(stack, ctx) else kernel_mlp(work, stack, ctx)


class PerToken(Gemv):
    """Each token alone, through the same arithmetic: m tokens, m submissions, no shared weight read."""

    name = "per_token"
    per_token = True
    # each token is handed over by itself, from the host
    fuses = None  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    experts_on_device = None  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    experts_of_plan = None  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def shared(self, x: Tensor, stack: ExpertStack, ctx: ArmContext) -> Tensor:
        """Row by row."""
        rows = ctx.empty("rows by token", (len(x), stack.down.shape[1]), ctx.store_dtype, x.device)
        for t in range(len(x)):
            with ctx.phase("row") as inner:
                rows[t : t + 1] = super().shared(x[t : t + 1], stack, inner)
        return rows


def _has_integers(name: str) -> bool:
    f = FORMATS.get(name)
    return f is not None and f.integer_form(torch.zeros(1, f.row_bytes(f.block), dtype=torch.uint8)) is not None


def _experts_of(groups: Sequence[Group], chunk_rows: int, device: torch.device) -> Tensor:
    """int32 [C]: the expert of each chunk of `chunk_table`."""
    experts = [g.expert for g in groups for _ in range(0, g.rows, chunk_rows)]
    return torch.tensor(experts, dtype=torch.int32, device=device)


def _kernel_mlp(work: PairWork, stack: ExpertStack, ctx: ArmContext) -> Tensor:
    """`kernel_mlp` of rows in q8_1: two launches where gate and up share a format, else quantise, gate, quantise, up,
    activation, quantise, down. Pairs in no chunk are left alone."""
    x, token, table, most_rows, out, out_row, *_ = work
    use, largest = kernels_for(stack.layout), 1 << max(0, most_rows - 1).bit_length()
    gate, up, down = stack.gate, stack.up, stack.down
    gates, ups, downs = (stack.weights(part) for part in ("gate", "up", "down"))
    row_of, target = token.to(torch.int32), out_row.to(torch.int32)
    if gate.format == up.format:
        experts = Experts(gates, ups, downs, gate.format, down.format)
        how = {"how": gate_of(ctx.spec), "store": ctx.store_dtype, "max_rows": largest, "empty": ctx.empty}
        return use.mlp(x, row_of, experts, table, out, target, **how)
    made = [ctx.empty(name, (len(token), gate.shape[1]), ctx.store_dtype, x.device) for name in ("gate", "up")]
    own = numbers(len(token), x.device)
    for q, w, to in ((gate, gates, made[0]), (up, ups, made[1])):
        use.product(use.quantize(x, q.format), row_of, w, table, q.format, to, max_rows=largest)
    hidden = use.quantize(activate(made[0], made[1], ctx), down.format)
    return use.product(hidden, own, downs, table, down.format, out, out_row=target, max_rows=largest)
