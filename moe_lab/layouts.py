"""What one expert's weights cost in each layout they can be kept in: raw as the file has them, planar, in tiles (which
decode by way of raw blocks), transposed.

Every layout holds the same weights in another order; a row says so by comparing all values. Knows no arms: decoding is
what is timed here, products are `moe_lab.bench`'s.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from moe_lab._types import Tensor
from moe_lab.checks import wants_whole
from moe_lab.errors import LabError
from moe_lab.execution.parts import Experts
from moe_lab.formats import Planar, QuantTensor, Tiled
from moe_lab.formats import transposed as turned
from moe_lab.open import Checkpoint
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.provider import StreamedExperts
from moe_lab.system.devices import resolve_device
from moe_lab_kernels import backend

TIMES = 5


class Kept(NamedTuple):
    """A layout at hand: its name, bytes, and what decodes it to fp32 [N, Kd]."""

    layout: str
    nbytes: int
    decode: Callable[[], Tensor]


def layout_rows(
    ckpt: Checkpoint, layer: int, *, expert: int = 0, device: str | torch.device = "cpu"
) -> list[dict[str, Any]]:
    """A row for each of gate, up and down of one expert and each layout that its format has.

    `layout` is "raw", "planar", "tiles", "transposed", or "both" (raw and transposed at once); `bytes` and
    `bits_per_weight` count scales and padding; `decode_ms` is the median of 5 decodings to fp32 on `device`, after one
    that is not timed, None for "both", which decodes as either; `same`: all values equal raw's bit for bit. LabError
    for a layer or an expert that the file has not.
    """
    where, spec = resolve_device(device), ckpt.layer_spec(layer)
    wants_whole("expert", expert, 0, spec.num_experts - 1)
    rows = []
    for role, weight in _expert(ckpt, layer, expert).items():
        q = weight.to(where)
        raw = _bits(q.dequantize())
        for kept in _layouts(q):
            rows.append(
                {
                    "layer": layer, "expert": expert, "role": role, "format": q.format,
                    "shape": "x".join(map(str, q.shape)), "layout": kept.layout, "bytes": kept.nbytes,
                    "bits_per_weight": 8 * kept.nbytes / raw.numel(),
                    "decode_ms": None if kept.layout == "both" else _median_ms(kept.decode, where),
                    "backend": backend.backend_of(q.data), "same": torch.equal(_bits(kept.decode()), raw),
                }
            )  # fmt: skip
    return rows


def _expert(ckpt: Checkpoint, layer: int, expert: int) -> dict[str, QuantTensor]:
    """The expert's matrices: read alone where they are runs of bytes in the file, else out of the whole layer."""
    try:
        source = ckpt.expert_source
    except LabError:  # the table without --layouts says why
        return _matrices(ckpt.layer(layer).experts, expert)
    with ExpertCache(slots=1) as cache:
        cache.bind(source, "cpu")
        return _matrices(StreamedExperts(source, layer, cache, torch.device("cpu")), expert)


def _matrices(experts: Experts, expert: int) -> dict[str, QuantTensor]:
    """Copies, since a cache's slots are another expert's afterwards."""
    with experts.lease([expert]) as fetched:
        return {role: _copy(fetched.stack.matrix(role, expert)) for role in fetched.stack.parts}


def _copy(q: QuantTensor) -> QuantTensor:
    parts = {name: t.clone(memory_format=torch.contiguous_format) for name, t in q.tensors.items()}
    return QuantTensor(shape=q.shape, format=q.format, codec=q.codec, **parts)


def _layouts(q: QuantTensor) -> Iterator[Kept]:
    yield Kept("raw", q.nbytes, q.dequantize)
    if Planar.refusal(q.format, *q.shape) is None:
        planar = Planar.from_raw(q)
        yield Kept("planar", planar.nbytes, planar.dequantize)
    if Tiled.refusal(q.format, *q.shape) is None:
        tiles = Tiled.from_raw(q)
        yield Kept("tiles", tiles.nbytes, lambda: tiles.to_raw().dequantize())
    if q.format in turned.FORMATS:
        both = turned.Resident.of(q, turned.LAYOUTS)
        assert both.transposed is not None
        yield Kept("transposed", both.transposed.nbytes, both.transposed.dequantize)
        yield Kept("both", both.nbytes, both.transposed.plain().dequantize)


def _bits(values: Tensor) -> Tensor:
    """fp32 as int32, so that a NaN equals itself and -0 is not 0."""
    return values.contiguous().view(torch.int32)


def _median_ms(decode: Callable[[], Tensor], device: torch.device) -> float:
    times = []
    for _ in range(TIMES + 1):
        start = time.perf_counter()
        decode()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])
