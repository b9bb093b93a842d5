"""What the arms launch: each arm on layers of every format it serves, at every number of rows that is cut otherwise.

A layer here is shapes alone (its memory is never touched), and launches are written down instead of started. E experts
of [F, D], [F, D], [D, F]; T tokens, K experts a token. Rows an expert are T * K / E = T / 4 on average.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.arms import ARMS, ArmContext, DeviceWork, ExpertBiases, ExpertStack, PlannedWork, refusal
from moe_lab.arms.fused import FusedStack
from moe_lab.arms.mmq import Mmq
from moe_lab.bench.weights import SERVED
from moe_lab.formats import FORMATS, QuantTensor, ScaledFormat, quantize
from moe_lab.formats.layouts import RAW, REPACKED
from moe_lab.formats.layouts import refusal as layout_refusal
from moe_lab.formats.repacked import Repacked
from moe_lab.spec import MoESpec, RouterSpec
from moe_lab_kernels.storage.blocks import GEMV_FORMATS

D, F, E, K = 2048, 768, 8, 2
# Rows a chunk: 1, 2, 4, 8. Rows a tile: 16, 32, 64, 128; then tiles whose weights are decoded, or opened, first: from
# about 100 rows an expert on, and from 384.
FEW, MANY = (1, 2, 4, 8), (8, 96, 192, 256, 1024, 2048)
# One variant stands for those that differ in a stride, a scale's group or a pointer: of most formats the widths 16, 64,
# 128 (32 is cut as 16 is) and mmq's 16, 64 (its lists of 128 are served by programs of 64) and opened; of the integer
# groups 64. Other formulas are the end of a program, whatever its width. K, a constant of the scatter, is 2.
EVERY_WIDTH = ("bf16", "q2_k+q3_k", "fp8_block", "mxfp4_oss")
SOME_MANY, MMQ_MANY = (8, 192, 256), (8, 192, 1024)
FORMULA_MANY = (8, 256, 2048)
ENDS = (1, 8, MMQ_MANY[-1])  # of other layouts than raw blocks: chunks of one row and of eight, short and full tiles
# gemv's one-grid launches of the integer formats, in every layout: the shared expert found by address, other formulas
# and rows. Chunks of eight rows hold the most registers, and those two spilled before there was a row for them.
FULL = (8,)
LIKE_ANOTHER = ("int4_g32", "int4_g128", "int8_g32", "int8_g128")
# Experts of other formulas than a plain SwiGLU's, in formats that models with them come in.
FORMULAS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gelu": ({"activation": "gelu_tanh"}, ("bf16", "q2_k+q8_0", "q4_0", "nvfp4_modelopt", "mxfp4")),
    "clamped": ({"limit": 7.0}, ("bf16", "q2_k+q3_k", "fp8_block", "mxfp4_oss")),
    "gpt-oss": (
        {"limit": 7.0, "limit_mode": "oai", "expert_bias": True}, ("bf16", "mxfp4_oss", "mxfp4", "q8_0", "q4_k+q6_k")),
    "weight on x": ({"weight_place": "input"}, ("bf16", "q4_k+q6_k")),
    "weight on h": ({"weight_place": "hidden"}, ("bf16", "q4_k+q6_k")),
}  # fmt: skip
OTHER_ROWS = ("bf16", "q2_k+q3_k", "mxfp4_oss")  # also with rows in fp16 and fp32
PLAIN = MoESpec(RouterSpec(E, K), D, F)


@dataclass(frozen=True, slots=True)
class Case:
    """One arm on one layer. `stores`: the dtype of x and of what is stored; `how`: expert formula, `activation`:
    `Options.activation`; `beside`: the shared expert as one more slot; `layout`: of the weights."""

    arm: str
    format: str
    tokens: tuple[int, ...]
    formula: str = ""
    stores: torch.dtype = torch.bfloat16
    activation: str | None = None
    beside: bool = False
    layout: str = RAW
    how: MoESpec = field(default=PLAIN)

    @property
    def label(self) -> str:
        """For the table."""
        more = (self.formula, self.activation or "", "fused shared expert" if self.beside else "",
                "" if self.layout == RAW else self.layout)  # fmt: skip
        rows = {torch.float16: "f16 rows", torch.float32: "f32 rows"}.get(self.stores, "")
        return ", ".join(word for word in (f"{self.arm} {self.format}", *more, rows) if word)


def cases() -> Iterator[Case]:
    """Every arm with every format, formula, dtype and activation that it takes."""
    formats = [f for f in dict.fromkeys([*FORMATS, *SERVED]) if f not in LIKE_ANOTHER]
    for arm, format in ((a, f) for a in ARMS for f in formats):
        tokens = _tokens(arm, format)
        if not tokens:
            continue
        one = Case(arm, format, tokens)
        yield one
        yield from (replace(one, activation=kind) for kind in ("q8_1", "bf16", "fp8"))
        few = tuple(t for t in tokens if t in (*FEW, *FORMULA_MANY))
        if format in OTHER_ROWS:
            yield from (replace(one, stores=t, tokens=few) for t in (torch.float16, torch.float32))
        if format in SERVED:
            yield replace(one, beside=True)
        for layout in REPACKED:
            yield replace(one, layout=layout, tokens=tuple(t for t in tokens if t in ENDS))
        if arm == "gemv" and format in GEMV_FORMATS:
            yield from _full_chunks(one)
        for name, (how, known) in FORMULAS.items():
            if format in known:
                yield replace(one, tokens=few, formula=name, how=replace(PLAIN, **how))


def _full_chunks(one: Case) -> Iterator[Case]:
    """Chunks of eight rows of an integer format in every layout."""
    for layout in (RAW, *REPACKED):
        laid_out = replace(one, layout=layout, tokens=FULL, beside=True)
        yield laid_out
        yield replace(laid_out, stores=torch.float32)
        clamped, gelu = (
            replace(laid_out, formula=name, how=replace(PLAIN, **FORMULAS[name][0])) for name in ("clamped", "gelu")
        )
        yield from (clamped, gelu, replace(clamped, beside=False))


def _tokens(arm: str, format: str) -> tuple[int, ...]:
    """Those of an arm that runs kernels of its own and not another's."""
    made = ARMS[arm]
    if arm == "gemv":
        return FEW
    if getattr(made, "experts_of_plan", None) is None or hasattr(made, "taker"):
        return ()
    return MMQ_MANY if isinstance(made, Mmq) else MANY if format in EVERY_WIDTH else SOME_MANY


def serves(case: Case) -> bool:
    """Whether the arm takes the case."""
    arm, formats = ARMS[case.arm], tuple(part for part in _parts(case.format))
    if refusal(arm, formats, "cuda", case.how) is not None:
        return False
    meets, fuses = getattr(arm, "meets", None), getattr(arm, "fuses", None)
    if case.activation is not None and (meets is None or meets(formats, case.activation) is not None):
        return False
    if case.layout != RAW:
        reads, sizes = getattr(arm, "reads", None), ((F, D), (F, D), (D, F))
        unread = reads is None or reads(case.layout, case.activation) is not None
        if unread or any(layout_refusal(case.layout, f, *nk) for f, nk in zip(formats, sizes, strict=True)):
            return False
    return not case.beside or (fuses is not None and fuses(formats) is None)


def run(case: Case) -> None:
    """Call the arm as a layer calls it, for each number of tokens, and for a shared expert's rows."""
    arm, stack = ARMS[case.arm], stack_of(case.format, case.how.expert_bias, case.layout)
    ctx = ArmContext(case.how, "cuda", case.stores, activation=case.activation)
    if case.beside:
        stack = FusedStack(stack, stack_of(case.format, False, case.layout, 1), E)
    for t in case.tokens:
        x = torch.empty(t, D, dtype=case.stores)
        y = torch.empty(t, K + case.beside, D, dtype=case.stores)
        pairs = t * K
        if t <= max(FEW) and hasattr(arm, "experts_on_device"):
            chunks, numbers = torch.zeros(pairs + case.beside, 3, dtype=torch.int32), _int32(pairs + t * case.beside)
            whose = _int32(len(chunks)) if case.how.expert_bias else None
            work = DeviceWork(numbers, torch.empty(len(numbers)), numbers, chunks, t, whose)
            arm.experts_on_device(x, stack, work, y, ctx)  # type: ignore[attr-defined]
        else:
            plan = PlannedWork(_int32(pairs), _int32(pairs), torch.empty(pairs), _int32(E), _int32(E + 1))
            arm.experts_of_plan(x, stack, plan, y, ctx)  # type: ignore[attr-defined]
        if case == Case(case.arm, case.format, case.tokens) and case.format in OTHER_ROWS:
            arm.shared(x, stack_of(case.format, False, RAW, 1), ctx)  # type: ignore[attr-defined]


@cache
def _int32(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32)


def _parts(format: str) -> tuple[str, str, str]:
    gate_up, _, down = format.partition("+")
    return gate_up, gate_up, down or gate_up


@cache
def stack_of(format: str, biased: bool, layout: str = RAW, experts: int = E) -> ExpertStack:
    """Experts of one format, or of gate and up's plus down's."""
    gate, up, down = _parts(format)
    biases = None
    if biased:
        biases = ExpertBiases(*(torch.empty(experts, n, dtype=torch.bfloat16) for n in (F, D, F)))
    sides = ((gate, F, D), (up, F, D), (down, D, F))
    parts = [weights(f, experts, n, kd) if layout == RAW else laid(layout, f, experts, n, kd) for f, n, kd in sides]
    return ExpertStack(parts[0], parts[1], parts[2], {e: e for e in range(experts)}, biases)


def weights(format: str, experts: int, n: int, kd: int) -> QuantTensor:
    """Matrices [experts, n, kd] of a format, uninitialised, in parts of the dtypes that the lab keeps them in."""
    codec = FORMATS[format]
    if not isinstance(codec, ScaledFormat):
        return QuantTensor.from_bytes(torch.empty(experts, n, codec.row_bytes(kd), dtype=torch.uint8), codec,
                                      (experts, n, kd))  # fmt: skip
    few = _encoded(format)
    assert n % FEW_ROWS == kd % FEW_VALUES == 0, "parts grow with the matrix, whole scales at a time"
    times = (n // FEW_ROWS, kd // FEW_VALUES)
    parts = {
        name: torch.empty(experts, *(a * b for a, b in zip(t.shape[1:], times, strict=False)), dtype=t.dtype)
        for name, t in few.tensors.items()
    }
    return replace(few, shape=(experts, n, kd), **parts)


def laid(layout: str, format: str, experts: int, n: int, kd: int) -> Repacked:
    """The same in another layout than raw blocks."""
    kind = REPACKED[layout]
    return kind(torch.empty(experts, *kind.room(format, n, kd), dtype=torch.uint8), format, (experts, n, kd))


FEW_ROWS, FEW_VALUES = 128, 256


@cache
def _encoded(format: str) -> QuantTensor:
    return quantize(torch.ones(1, FEW_ROWS, FEW_VALUES), format)
