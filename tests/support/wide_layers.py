"""Layers of every width and format that the decode arms serve, with picks that give experts 1 to 9 rows."""

from dataclasses import replace
from functools import cache
from itertools import product

import torch

from moe_lab.formats import QuantTensor, quantize
from moe_lab.layer import MoELayer
from moe_lab.routing import Routing
from moe_lab.spec import MoESpec, RouterSpec
from moe_lab_kernels.gemv_float.operands import served
from moe_lab_kernels.storage.blocks import GEMV_FORMATS

E, T = 3, 9
WIDTHS = (256, 704, 2304, 2880)
ROWS = ((9, 1, 5), (8, 2, 6), (7, 3, 4), (9, 4, 1))  # of each expert, call by call
SETTINGS = [{"combine_order": order, "stores": stores} for order in ("rank", "expert") for stores in ("input", "fp32")]
FLOAT_FORMATS = ("f32", "f16", "bf16", "fp8_block", "nvfp4_modelopt", "nvfp4_ct", "mxfp4_oss", "mxfp8", "int4_g32",
                 "int4_g64", "int4_g128", "int8_g32", "int8_g64", "int8_g128")  # fmt: skip
Case = tuple[str, int, int, tuple[int, ...]]


FORMATS = (*GEMV_FORMATS, *FLOAT_FORMATS)


def pairs(format: str) -> list[tuple[int, int]]:
    """(D, F): every pair of widths that hold whole blocks of the format."""
    return [(d, f) for d, f in product(WIDTHS, WIDTHS) if served(format, d) is None and served(format, f) is None]


def every_case(formats: tuple[str, ...] = FORMATS) -> list[Case]:
    """(format, D, F, calls) of every pair of widths; its calls are all numbers into `ROWS` and `SETTINGS`."""
    return [(format, d, f, tuple(range(len(ROWS)))) for format in formats for d, f in pairs(format)]


def cases(formats: tuple[str, ...] = FORMATS) -> list[Case]:
    """A quarter of them: each width of a format once as D and once as F, paired otherwise from format to format; its
    calls are all of them together."""
    out = []
    for shift, format in enumerate(formats):
        fits = [d for d, f in pairs(format) if d == f]
        n = len(fits)
        for i, d in enumerate(fits):
            out.append((format, d, fits[(i + shift) % n], tuple(range(i, len(ROWS), n))))
    return out


@cache
def _book(format: str, kd: int) -> QuantTensor:
    return quantize(torch.randn(8, kd, generator=torch.Generator().manual_seed(kd)) / kd**0.5, format)


def _dealt(format: str, n: int, kd: int, draw: torch.Generator) -> QuantTensor:
    """E matrices [n, kd] of 8 genuinely quantised rows, dealt at random (all are their own where rows share scales)."""
    if format == "fp8_block":
        return quantize(torch.randn(E, n, kd, generator=draw) / kd**0.5, format)
    book = _book(format, kd)
    pick = torch.randint(8, (E, n), generator=draw)
    parts = {name: None if getattr(book, name) is None else getattr(book, name)[pick] for name in ("scales", "biases")}
    whole = None if book.global_scale is None else book.global_scale.reshape(()).repeat(E)
    return replace(book, data=book.data[pick], shape=(E, n, kd), global_scale=whole, **parts)


def make(format: str, d: int, f: int, device: str = "cpu") -> MoELayer:
    """A layer whose three parts have this format."""
    draw = torch.Generator().manual_seed(d + f)
    gate, up, down = (_dealt(format, *s, draw).to(device) for s in ((f, d), (f, d), (d, f)))
    spec = MoESpec(RouterSpec(E, E), d, f)
    return MoELayer.from_tensors(spec, router=torch.zeros(E, d, device=device), gate=gate, up=up, down=down)


def picks(call: int, device: str = "cpu") -> Routing:
    """Expert e for the first ROWS[call][e] tokens, experts in the order 2, 0, 1; other slots are skipped."""
    ids = torch.tensor([[e if t < ROWS[call][e] else -1 for e in (2, 0, 1)] for t in range(T)])
    weights = torch.rand(T, E, generator=torch.Generator().manual_seed(call)) + 0.1
    return Routing(ids.to(device), weights.to(device))


def rows(d: int, device: str = "cpu") -> torch.Tensor:
    """Gaussian bf16 [T, D]."""
    return torch.randn(T, d, generator=torch.Generator().manual_seed(d)).bfloat16().to(device)


def row_of(format: str) -> str:
    """The tolerance table's row for a layer of this format against the reference."""
    if format not in GEMV_FORMATS:
        return "store/bf16"
    return "gemv/q4_0 layer" if format == "q4_0" else "gemv/layer"
