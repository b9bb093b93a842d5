"""A user's arms as docs/your_own.md describes them: a GEMV in torch, and the same with its product in Triton."""

import torch
import triton
import triton.language as tl
from torch.nn.functional import silu


class TorchGemv:
    """One row at a time on decoded weights."""

    name = "own_torch"

    def supports(self, formats, backend):
        return None

    def product(self, weight, row):
        return weight @ row

    def experts(self, x, stack, schedule, groups, y, ctx):
        for g in groups:
            gate, up, down = (stack.values(part, g.expert) for part in ("gate", "up", "down"))
            for p in range(g.first, g.first + g.rows):
                token, slot = schedule.token[p], schedule.slot[p]
                row = x[token].float()
                y[token, slot] = self.product(down, silu(self.product(gate, row)) * self.product(up, row)).to(y.dtype)


@triton.jit
def matvec(w, x, out, n, kd, ROWS: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, kd, TILE):
        k = start + tl.arange(0, TILE)
        values = tl.load(w + row[:, None] * kd + k, mask=(row[:, None] < n) & (k < kd), other=0.0)
        total += tl.sum(values * tl.load(x + k, mask=k < kd, other=0.0), 1)
    tl.store(out + row, total, mask=row < n)


class TritonGemv(TorchGemv):
    """The same where kernels run."""

    name = "own_triton"

    def supports(self, formats, backend):
        return "it needs a GPU or the interpreter" if backend == "torch" else None

    def product(self, weight, row):
        out = torch.empty(len(weight), device=row.device)
        matvec[(triton.cdiv(len(weight), 64),)](weight, row.contiguous(), out, *weight.shape, ROWS=64, TILE=64)
        return out


class OneTileShort(TorchGemv):
    """Wrong: its loop ends one tile early."""

    name = "own_wrong"

    def product(self, weight, row):
        return weight[:, :-8].contiguous() @ row[:-8]
