"""Known ways in which 8-bit activations go wrong, looked for in the rows at hand and named.

raw-sum decorrelation  sums of unquantised values make the minimum's part exact while the codes' part keeps its error,
                       which is then that of sc * q alone and no longer of the centred w = sc * q - m
scale underflow        an fp16 scale below 2^-14 has fewer bits, below 2^-25 none
sum overflow           an fp16 sum past 65504 is infinite, and infinity times a minimum of 0 is NaN
tail trap              a prompt is cut into micro-batches; a remainder of few tokens runs through the decode arm, so
                       that 512 + 7 tokens mix both arms in one pass
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from moe_lab._types import Float, Tensor
from moe_lab.analysis.frames import frame
from moe_lab.checks import wants_whole
from moe_lab.execution.options import Options
from moe_lab.formats import Arithmetic, QuantRows, QuantTensor
from moe_lab.layer import MoELayer
from moe_lab.numerics.emulation import quantize_for
from moe_lab.parity.emulated import emulate_layer
from moe_lab.parity.layer_attribution import side
from moe_lab.parity.setting import Setting, is_plain, kind_of
from moe_lab.parity.terms import factors, unsigned
from moe_lab.routing import Routing

if TYPE_CHECKING:
    import pandas as pd

SMALLEST_NORMAL = 2.0**-14  # of fp16
DECORRELATED = 1.5  # from this ratio of powers on, raw sums are called a hazard
MICRO_BATCH, DECODE_LIMIT = 512, 8  # ggml's defaults; 8 columns at most go to its vector kernels
COLUMNS = ("hazard", "arm", "part", "count", "of", "factor", "says")


def decorrelation(q: QuantTensor, arithmetic: Arithmetic) -> float:
    """E[(scale * code)^2] / E[w^2], by how much raw sums multiply the activations' quantising error; 1 where an arm has
    none. Weights [N, Kd]."""
    if arithmetic.safe_sum or arithmetic.sum not in ("raw", "raw_all"):
        return 1.0
    made = factors(q, arithmetic)
    if made.minimum is None:
        return 1.0
    codes = made.codes * made.scale.unsqueeze(-1)
    power = float((codes - made.minimum.unsqueeze(-1)).square().mean())
    return float(codes.square().mean()) / power if power else 1.0


def underflows(rows: QuantRows, x: Float[Tensor, "R Kd"]) -> tuple[int, int]:
    """Blocks that are not zero but whose stored fp16 scale is subnormal or 0, of how many."""
    block, kd = rows.layout.block, x.shape[1]
    if rows.scale.dtype != torch.float16:
        return 0, rows.scale.numel()
    padded = torch.nn.functional.pad(x.float(), (0, rows.codes.shape[1] - kd))
    some = padded.unflatten(1, (-1, block)).abs().amax(-1) > 0
    return int((some & (rows.scale.float().abs() < SMALLEST_NORMAL)).sum()), rows.scale.numel()


def product_hazards(x: Float[Tensor, "R Kd"], q: QuantTensor, setting: Setting, part: str = "") -> list[tuple]:
    """Rows of `COLUMNS` for one product of rows and weights [N, Kd]: those that apply to it, with what was found."""
    if is_plain(q.format):
        return []
    arithmetic = setting.arithmetic(q.format)
    rows = quantize_for(x, q.format, arithmetic)
    found = []
    factor = decorrelation(q, arithmetic)
    if factor != 1.0:
        kept, of = (8, 8) if unsigned(q.format, arithmetic) else (rows.layout.sums_kept, 8)
        found.append(("raw-sum decorrelation", kept, of, factor, _decorrelated(factor, kept)))
    low, blocks = underflows(rows, x)
    if rows.scale.dtype == torch.float16:
        found.append(("fp16 scale underflow", low, blocks, 1.0, f"{low} of {blocks} scales are subnormal or 0"))
    over = int(rows.overflowed())
    if rows.total is not None and rows.total.dtype == torch.float16:
        found.append(("fp16 sum overflow", over, rows.total.numel(), 1.0, f"{over} sums are infinite"))
    return [(name, setting.arm, part, *rest) for name, *rest in found]


def _decorrelated(factor: float, kept: int) -> str:
    verdict = "multiply" if factor >= DECORRELATED else "leave nearly as it is"
    return f"raw sums of {kept} in 8 sub-blocks {verdict} the activations' error there: {factor:.1f}x"


def tail_trap(tokens: int, *, micro_batch: int = MICRO_BATCH, limit: int = DECODE_LIMIT) -> tuple[int, int]:
    """(tokens of the prefill arm, tokens of the decode arm) of a prompt cut into micro-batches; the trap is both above
    0. ggml's rule: an arm for a whole micro-batch, by its number of tokens."""
    for name, value, low in (("tokens", tokens, 0), ("micro_batch", micro_batch, 1), ("limit", limit, 0)):
        wants_whole(name, value, low)
    rest = tokens % micro_batch
    decode = rest if 0 < rest <= limit else 0
    decode = tokens if micro_batch <= limit else decode
    return tokens - decode, decode


def hazards(
    layer: MoELayer,
    x: Float[Tensor, "T D"],
    arms: Sequence[str | Setting],
    *,
    routing: Routing | None = None,
    options: Options | None = None,
    layers: Mapping[str, MoELayer] | None = None,
) -> "pd.DataFrame":
    """A row for each hazard, arm and part of the layer: hazard, arm, part, count of what was found, of how many,
    factor, and what it says; counts of all experts together, the factor their mean. The tail trap has one row, by T.
    `layers`: by an arm's name the layer that it computes with, where its experts are stored otherwise than `layer`'s.

    A count of 0 was looked for and not found; a hazard that cannot arise (no fp16 sums) has no row.
    """
    routing = layer.route(x) if routing is None else routing
    found: dict[tuple[str, str, str], list[tuple]] = {}
    for arm in arms:
        own = layer if isinstance(arm, Setting) else (layers or {}).get(arm, layer)
        setting = side(arm, x, options, own)
        seen: dict[tuple[str, int], Tensor] = {}
        emulate_layer(own, x, routing, setting, options=options, seen=seen)
        for (part, expert), rows in seen.items():
            with own.experts.lease([expert] if not part.startswith("shared") else []) as held:
                stack = own.shared_stack if part.startswith("shared") else held.stack
                assert stack is not None
                q = stack.matrix(part.removeprefix("shared "), expert)
                for row in product_hazards(rows, q, setting, part):
                    found.setdefault(row[:3], []).append(row)
    return frame([*(_together(rows) for rows in found.values()), _trap_row(len(x), arms)], COLUMNS, "hazards")


def _together(rows: list[tuple]) -> tuple:
    name, arm, part = rows[0][:3]
    count, of = sum(r[3] for r in rows), sum(r[4] for r in rows)
    factor = sum(r[5] for r in rows) / len(rows)
    if name == "raw-sum decorrelation":
        return name, arm, part, rows[0][3], rows[0][4], factor, _decorrelated(factor, rows[0][3])
    kind = "scales are subnormal or 0" if "scale" in name else "sums are infinite"
    return name, arm, part, count, of, factor, f"{count} of {of} {kind}"


def _trap_row(tokens: int, arms: Sequence[str | Setting]) -> tuple:
    prefill, decode = tail_trap(tokens)
    mixed = prefill and decode
    says = f"micro-batches of {MICRO_BATCH} would send {decode} of {tokens} tokens through the decode arm"
    names = {a if isinstance(a, str) else a.arm for a in arms}
    kinds = {kind_of(n) for n in names}
    bites = bool(mixed) and "gemv" in kinds and len(kinds) > 1  # two prefill arms have no decode arm to mix with
    return "tail trap", ", ".join(sorted(names)), "", decode if bites else 0, tokens, 1.0, says
