"""ggml's prefill arms: int8 tensor-core products on raw blocks, activations quantised as each format asks.

`mmq`: ggml's arithmetic for its GPU prefill (d4, ds4, d2s6 rows). `mmq_folded`: the scales of sub-blocks folded into
the codes' integers, against q8_k rows: ggml's arithmetic for the CPU, which is quicker and rounds activations
otherwise; formats without sub-block scales have nothing to fold and keep mmq's. Rows of x are quantised once, hidden
rows once more. A row's bits depend neither on the batch nor on the tiles; torch, interpreter and GPU have the same
products.
"""

from collections.abc import Sequence

import torch

from moe_lab._types import Tensor
from moe_lab.arms.base import ArmContext, reads_only
from moe_lab.arms.formula import bias_parts, gate_of, hidden_rows, lacks_formula, source_rows
from moe_lab.arms.lists import numbers, shared_tiles, tiles_of, zeros
from moe_lab.arms.schedule import Group, PlannedWork, Schedule
from moe_lab.arms.stack import ExpertStack, by_slot
from moe_lab.formats import quantize_activations
from moe_lab.formats.layouts import RAW
from moe_lab.spec import MoESpec
from moe_lab_kernels.grouped import operands as go
from moe_lab_kernels.grouped.tiles import WorkList
from moe_lab_kernels.mmq import mmq
from moe_lab_kernels.mmq.operands import FOLDED, HAS_MINIMA, MMQ_LAYOUTS, MmqRows, folded_layout, layout_for
from moe_lab_kernels.mmq.ref import product_ref


class Mmq:
    """All rows of an expert together, up to a tile of them for each read of its weights."""

    name = "mmq"
    per_token = False
    layouts: tuple[str, ...] = (RAW, "planar")

    def layout(self, format: str) -> str:
        """The layout of activations for weights of a format."""
        return layout_for(format)

    def supports(self, formats: Sequence[str], backend: str) -> str | None:
        """Formats with ggml's integer arithmetic."""
        missing = sorted({f for f in formats if f not in MMQ_LAYOUTS})
        return f"it serves {', '.join(MMQ_LAYOUTS)}, not {', '.join(missing)}" if missing else None

    def reads(self, layout: str, activation: str | None) -> str | None:
        """See `ArmExtras.reads`."""
        return None if layout in self.layouts else reads_only(self.layouts, layout)

    def tolerance(self, formats: Sequence[str]) -> str:
        """Sums of unquantised values meet the minima, where there are any: the row of the tolerance table."""
        raw = any(f in HAS_MINIMA and self.layout(f) != "q8_k" for f in formats)
        return "mmq/layer" if raw else "bench/layer"

    def lacks(self, spec: MoESpec) -> str | None:
        """Gated experts alone; biases, every clamp and every place of the routing weight are served."""
        return lacks_formula(spec)

    def experts(
        self, x: Tensor, stack: ExpertStack, schedule: Schedule, groups: Sequence[Group], y: Tensor, ctx: ArmContext
    ) -> None:
        """See `Arm.experts`."""
        first, last = groups[0].first, groups[-1].first + groups[-1].rows
        token, slot, weight = (t[first:last] for t in (schedule.token, schedule.slot, schedule.weight))
        local = [Group(g.expert, g.first - first, g.rows) for g in groups]
        if ctx.backend == "torch":
            y[token, slot] = self._torch_mlp(x, token, stack, local, ctx, weight).to(y.dtype)
            return
        to = go.Scatter(token.to(torch.int32), slot.to(torch.int32), y.shape[1])
        work = tiles_of(stack, local, len(token), x.device)
        ctx.work.weight_bytes += len(work.tiles) * stack.expert_bytes
        self._kernel_mlp(x, to, stack, work, ctx, y.view(-1, y.shape[-1]), weight)

    def experts_of_plan(self, x: Tensor, stack: ExpertStack, plan: PlannedWork, y: Tensor, ctx: ArmContext) -> None:
        """See `ArmExtras.experts_of_plan`."""
        if ctx.backend != "torch":
            to = go.Scatter(plan.token, plan.slot, y.shape[1])
            self._kernel_mlp(x, to, stack, plan.tiles(), ctx, y.view(-1, y.shape[-1]), plan.weight)
            return
        known = plan.known()
        for groups in known.steps:
            made = self._torch_mlp(x, known.token, stack, groups, ctx, known.weight)
            y[known.token, known.slot] = made.to(y.dtype)

    def shared(self, x: Tensor, stack: ExpertStack, ctx: ArmContext) -> Tensor:
        """The shared expert over all rows: x [T, D] -> [T, D] of the stored dtype."""
        groups = [Group(0, 0, len(x))]
        if ctx.backend == "torch":
            return self._torch_mlp(x, torch.arange(len(x), device=x.device), stack, groups, ctx)
        out = ctx.empty("shared rows", (len(x), stack.down.shape[1]), ctx.store_dtype, x.device)
        work = shared_tiles(len(x), x.device)
        ctx.work.weight_bytes += len(work.tiles) * stack.expert_bytes
        self._kernel_mlp(x, go.Scatter(numbers(len(x), x.device), zeros(len(x), x.device), 1), stack, work, ctx, out)
        return out

    def rows(self, x: Tensor, format: str) -> MmqRows:
        """x as weights of a format meet it."""
        layout = self.layout(format)
        made = quantize_activations(x, layout)
        return MmqRows(made.codes, made.scale, made.total, layout)

    def _kernel_mlp(
        self,
        x: Tensor,
        to: go.Scatter,
        stack: ExpertStack,
        work: WorkList,
        ctx: ArmContext,
        out: Tensor,
        weight: Tensor | None = None,
    ) -> None:
        """Down rows through the kernels, written to out where `to` says; `weight` fp32 [P], the router's. Nothing is
        read back."""
        gate, up, down = (_weight(stack, name) for name in ("gate", "up", "down"))
        of_gate, of_up, of_down = bias_parts(stack.biases)
        scratch = self._scratch(work, (gate, up, down), ctx, x.device)
        x, row_of = source_rows(x, to.row, weight, ctx.spec)
        rows, how = self.rows(x, gate.format), gate_of(ctx.spec, weight)
        if mmq.fuses(gate, up, work, rows.layout == "q8_k", how):
            hidden = ctx.empty("hidden", (len(to.row), gate.rows), ctx.store_dtype, x.device)
            both = None if of_gate is None or of_up is None else (of_gate, of_up)
            mmq.mmq_gate_up(rows, row_of, gate, up, work, hidden, how=how, biases=both)
        else:
            g, u = (ctx.empty(n, (len(to.row), gate.rows), ctx.store_dtype, x.device) for n in ("gate", "up"))
            mmq.mmq_product(rows, row_of, gate, work, g, bias=of_gate, scratch=scratch)
            of_x = rows if up.format == gate.format else self.rows(x, up.format)
            mmq.mmq_product(of_x, row_of, up, work, u, bias=of_up, scratch=scratch)
            hidden = hidden_rows(g, u, weight, ctx)
        rows = self.rows(hidden, down.format)
        mmq.mmq_product(rows, None, down, work, out, to=to, bias=of_down, scratch=scratch)

    def _scratch(
        self, work: WorkList, weights: Sequence[go.Weight], ctx: ArmContext, device: torch.device
    ) -> Tensor | None:
        """Room for opened weights, the same for the three products one after another; None where none opens any."""
        most = max(mmq.scratch_for(work, self.layout(w.format) == "q8_k", w) for w in weights)
        return ctx.empty("opened weights", (most,), torch.uint8, device) if most else None

    def _torch_mlp(
        self,
        x: Tensor,
        token: Tensor,
        stack: ExpertStack,
        groups: Sequence[Group],
        ctx: ArmContext,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Down rows [P, D] of the pairs in order; each distinct row of x is quantised once for each layout."""
        ctx.work.weight_bytes += len(groups) * stack.expert_bytes
        x, of = source_rows(x, token, weight, ctx.spec)

        def project(part: str, rows: MmqRows, of: Tensor | None) -> Tensor:
            ctx.work.products += len(groups)
            done = []
            for g in groups:
                span = slice(g.first, g.first + g.rows)
                at = span if of is None else of[span]
                picked = rows.each(lambda t, at=at: t[at])
                product = product_ref(stack.matrix(part, g.expert).data, picked, stack.part(part).format)
                bias = stack.bias(part, g.expert)
                done.append(product if bias is None else product + bias.float())
            return ctx.store(torch.cat(done))

        gate, up = (project(part, self.rows(x, stack.part(part).format), of) for part in ("gate", "up"))
        return project("down", self.rows(hidden_rows(gate, up, weight, ctx), stack.down.format), None)


class MmqFolded(Mmq):
    """The folded form."""

    name = "mmq_folded"

    def layout(self, format: str) -> str:
        """q8_k where there are sub-block scales to fold."""
        return folded_layout(format)

    def supports(self, formats: Sequence[str], backend: str) -> str | None:
        """At least one format with scales to fold."""
        reason = super().supports(formats, backend)
        if reason is None and not set(formats) & set(FOLDED):
            reason = f"none of {', '.join(sorted(set(formats)))} has sub-block scales to fold; arm 'mmq' has its bits"
        return reason


def _weight(stack: ExpertStack, part: str) -> go.Weight:
    q = stack.part(part)
    return go.Weight(by_slot(q), q.format, q.shape[-1], layout=q.layout)
