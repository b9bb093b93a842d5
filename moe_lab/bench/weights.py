"""Layers of a workload's shape: seeded, genuinely quantised weights in any format, made in seconds.

Random bytes would be quicker still, but their scales are absurd and parity would measure nothing. Formats whose scales
lie in the rows are dealt from a book of 128 quantised rows; the others, whose scales may span rows, repeat sixteen
quantised experts. T tokens, D model width, F expert width, E experts. Knows nothing about clocks.
"""

from typing import Any

import torch

from moe_lab._types import Float, Tensor
from moe_lab.bench.workloads import LayerShape
from moe_lab.errors import LabError
from moe_lab.formats import QuantTensor, ScaledFormat, WeightFormat, get_format, quantize
from moe_lab.layer import MoELayer
from moe_lab.spec import MoESpec, RouterSpec

# The formats that models of these shapes are served in: gate and up, then down.
SERVED = (
    "bf16", "fp8_block", "mxfp4_oss", "nvfp4_modelopt", "mxfp4", "q2_k+q3_k", "q4_k+q6_k", "q2_k+q8_0", "q8_0",
)  # fmt: skip
BOOK_ROWS = 128
BOOK_EXPERTS = 16


def split_format(format: str | WeightFormat) -> tuple[str | WeightFormat, str | WeightFormat]:
    """(gate and up, down) of "q2_k+q3_k", or of one name or a format of the user's for all three. LabError for an
    unknown format, LabTypeError for what is none."""
    if not isinstance(format, str):
        return get_format(format), format
    parts = format.split("+")
    if len(parts) > 2:
        raise LabError(f"format {format!r}: wanted one name, or gate/up's and down's as in q2_k+q3_k.")
    for part in parts:
        get_format(part)
    return parts[0], parts[-1]


def format_label(format: str | WeightFormat) -> str:
    """What records call it."""
    return format if isinstance(format, str) else format.name


def unfit(shape: LayerShape, format: str | WeightFormat) -> str | None:
    """Why the layer cannot be in this format, or None: rows of D (gate, up) and of F (down) must be whole blocks."""
    for part, one, width in zip(
        ("gate and up", "down"), split_format(format), (shape.d_model, shape.d_expert), strict=True
    ):
        codec = get_format(one)
        try:
            codec.row_bytes(width)
        except LabError:
            return f"{part} rows of {width} values are no whole blocks of {codec.block}, which {codec.name} needs"
    return None


def _rows(width: int, draw: torch.Generator) -> Float[Tensor, "rows Kd"]:
    """Student-t with 5 degrees of freedom (trained weights have heavy tails), scaled for rows of that width."""
    normal = torch.randn(BOOK_ROWS, width, generator=draw)
    chi_squared = torch.randn(5, BOOK_ROWS, width, generator=draw).square().sum(0)
    return normal * (5.0 / chi_squared).sqrt() / width**0.5


def make_matrices(
    shape: tuple[int, int, int], format: str | WeightFormat, draw: torch.Generator, device: str
) -> QuantTensor:
    """One projection of all experts [E, N, Kd] on `device`; random picks and values come from `draw` on the CPU."""
    experts, n, width = shape
    codec, rows = get_format(format), _rows(width, draw).to(device)
    if isinstance(codec, ScaledFormat):
        few = min(experts, BOOK_EXPERTS)
        book = quantize(rows[torch.randint(BOOK_ROWS, (few, n), generator=draw).to(device)], codec)
        pick = (torch.arange(experts) % few)[torch.randperm(experts, generator=draw)].to(device)
        parts = {name: t[pick] for name, t in book.tensors.items()}
        named = (parts["data"], parts.get("scales"), parts.get("global_scale"))
        return QuantTensor.from_parts(*named, codec, shape, biases=parts.get("biases"))
    book = quantize(rows, codec).data
    pick = torch.randint(BOOK_ROWS, (experts, n), generator=draw).to(device)
    return QuantTensor.from_bytes(book[pick], codec, shape)


def make_layer(shape: LayerShape, format: str | WeightFormat, device: str = "cpu", seed: int = 0) -> MoELayer:
    """A resident layer of gated silu experts in `format` (see `split_format`), with a bf16 router.

    LabError where the shape does not fit the format (`unfit`) or the format is unknown.
    """
    why = unfit(shape, format)
    if why is not None:
        raise LabError(f"{shape.name} in {format_label(format)}: {why}.")
    e, f, d = shape.experts, shape.d_expert, shape.d_model
    draw = torch.Generator().manual_seed(seed)
    gate_up, down = split_format(format)
    shapes = {"gate": ((e, f, d), gate_up), "up": ((e, f, d), gate_up), "down": ((e, d, f), down)}
    parts: dict[str, Any] = {name: make_matrices(*what, draw, device) for name, what in shapes.items()}
    router = (torch.randn(e, d, generator=draw) / d**0.5).bfloat16().to(device)
    return MoELayer.from_tensors(MoESpec(RouterSpec(e, shape.top_k), d, f), router=router, **parts)
