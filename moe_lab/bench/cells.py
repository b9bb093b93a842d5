"""From what a benchmark was asked for to the cells it measures, built one at a time and only when their turn comes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch

from moe_lab._types import Float, Tensor
from moe_lab.bench.cell import Cell, Settings, case_of
from moe_lab.bench.check import rows_of
from moe_lab.bench.weights import SERVED, format_label, make_layer, split_format, unfit
from moe_lab.bench.workloads import SHAPES, LayerShape, Popularity, rotations, routings
from moe_lab.errors import LabError, LabTypeError
from moe_lab.execution.inputs import DTYPES
from moe_lab.formats import WeightFormat
from moe_lab.layer import MoELayer, Options
from moe_lab.routing import Routing
from moe_lab.runs import Case
from moe_lab.system.devices import resolve_device

Subject = MoELayer | str | LayerShape
Format = str | WeightFormat
TOKENS = {"cpu": (1, 8), "cuda": (1, 4, 8, 32, 64, 128, 512)}
SHRINK = {"cpu": 8, "cuda": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What to measure. `subject`: a layer, a name of `SHAPES` or a LayerShape, or several of them.

    `x` [T, D]: a layer's rows; its router picks on them, unless `routing` is given. None: seeded noise and picks by
    `popularity`. `tokens`: T, or several (None: all of x; without x, TOKENS). `formats`: for shapes, names or objects
    (None: SERVED). `device`: for shapes (None: a GPU where there is one). `name`, `model`: what records call the rows
    and the model.
    """

    subject: Subject | Sequence[Subject]
    x: Float[Tensor, "T D"] | None = None
    routing: Routing | None = None
    tokens: int | Sequence[int] | None = None
    formats: Format | Sequence[Format] | None = None
    popularity: Popularity = "uniform"
    device: str | None = None
    name: str = ""
    model: str = ""
    options: Options = field(default_factory=Options)

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """One or several, as a tuple."""
        one = isinstance(self.subject, MoELayer | str | LayerShape)
        return (self.subject,) if one else tuple(self.subject)  # type: ignore[return-value,arg-type]


@dataclass(frozen=True, slots=True)
class Planned:
    """A cell to come. `build` makes it; `refused` says why there will be none."""

    case: Case
    format: str
    device: torch.device
    build: Callable[[], Cell]
    refused: str | None = None

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.case.label} in {self.format}"


def planned(workload: Workload, settings: Settings) -> Iterator[Planned]:
    """Every cell of a workload, in order. LabError or LabTypeError before the first one for what cannot be asked."""
    subjects = [_known(subject, workload, settings) for subject in workload.subjects]
    layers = [s for s in subjects if isinstance(s, MoELayer)]
    if len(layers) not in (0, len(subjects)):
        raise LabError("a benchmark takes layers or shapes, not both at once.")
    if not layers and (workload.x is not None or workload.routing is not None):
        raise LabError("x and routing belong to a layer; a shape's rows and picks are drawn from the seed.")
    if layers and workload.formats is not None:
        raise LabError("formats belong to shapes; a layer has its own.")
    for subject in subjects:
        if isinstance(subject, MoELayer):
            yield from _layer_cells(subject, workload, settings)
        else:
            yield from _shape_cells(subject, workload, settings)


def _known(subject: object, workload: Workload, settings: Settings) -> MoELayer | LayerShape:
    """A named shape is shrunk where the device is a CPU or the settings say so; what the user made stays as it is."""
    if isinstance(subject, str):
        if subject not in SHAPES:
            raise LabError(f"no workload is called {subject!r}; known: {', '.join(SHAPES)}.")
        factor = SHRINK[_device(workload).type] if settings.shrink is None else settings.shrink
        return SHAPES[subject].shrunk(factor)
    if not isinstance(subject, MoELayer | LayerShape):
        raise LabTypeError(
            f"a benchmark takes a layer, a workload's name or a LayerShape, got {type(subject).__name__}."
        )
    return subject


def _device(workload: Workload) -> torch.device:
    return resolve_device(workload.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _tokens(workload: Workload, otherwise: Sequence[int]) -> tuple[int, ...]:
    asked = workload.tokens
    tokens = tuple(otherwise) if asked is None else (asked,) if isinstance(asked, int) else tuple(asked)
    if not tokens or min(tokens) < 1:
        raise LabError(f"tokens are {tokens}; wanted one T or several, each 1 or more.")
    return tokens


def _layer_cells(layer: MoELayer, workload: Workload, settings: Settings) -> Iterator[Planned]:
    x, spec, device = workload.x, layer.spec, layer.device
    _check_rows(layer, workload)
    number = "" if layer.number is None else f" layer {layer.number}"
    model = workload.model or spec.family
    shape = LayerShape(f"{model}{number}", spec.d_model, spec.d_expert, spec.num_experts, spec.top_k)
    name = workload.name or ("given rows" if x is not None else workload.popularity)
    format = "+".join(dict.fromkeys(layer.experts.formats))
    for t in _tokens(workload, TOKENS[device.type] if x is None else (len(x),)):
        case = case_of(shape, name, t)
        build = _drawn if x is None else _given
        yield Planned(case, format, device, partial(build, layer, t, case, workload, settings))


def _check_rows(layer: MoELayer, workload: Workload) -> None:
    x, routing, d = workload.x, workload.routing, layer.spec.d_model
    if x is None:
        if routing is not None:
            raise LabError("routing was given without the rows x that it belongs to.")
        return
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        raise LabTypeError(f"x is a {getattr(x, 'dtype', type(x).__name__)}; wanted float32, float16 or bfloat16 rows.")
    if x.ndim != 2 or x.shape[1] != d or not len(x):
        raise LabError(f"x has shape {tuple(x.shape)}; wanted [T, D] with T >= 1 and D={d}.")
    if x.device != layer.device:
        raise LabError(f"x lives on {x.device} but the layer on {layer.device}: move one of them.")
    if routing is not None and routing.tokens != len(x):
        raise LabError(f"routing holds T={routing.tokens} tokens, x has T={len(x)}.")
    most = max(_tokens(workload, (len(x),)))
    if most > len(x):
        raise LabError(f"T={most} tokens asked, but x has {len(x)} rows.")


def _given(layer: MoELayer, t: int, case: Case, workload: Workload, settings: Settings) -> Cell:
    """Rows of x, one stretch of T after the other; the layer's own picks unless others are given."""
    assert workload.x is not None
    x, spec = workload.x.detach(), layer.spec
    shape = LayerShape(case.model, spec.d_model, spec.d_expert, spec.num_experts, spec.top_k)
    r = max(1, min(rotations(t, shape), len(x) // t))
    rows = x[: r * t].reshape(r, t, -1).contiguous()
    own = workload.routing
    picks = [layer.route(v) if own is None else rows_of(own, slice(i * t, i * t + t)) for i, v in enumerate(rows)]
    return Cell(layer, rows, picks, case, workload.options)


def _drawn(
    layer: MoELayer, t: int, case: Case, workload: Workload, settings: Settings, shape: LayerShape | None = None
) -> Cell:
    """Gaussian rows and picks of the workload's popularity, both from the seed; bf16 but for a layer on a CPU."""
    spec, device = layer.spec, layer.device
    sizes = shape or LayerShape(case.model, spec.d_model, spec.d_expert, spec.num_experts, spec.top_k)
    picks = [Routing(*pair) for pair in routings(sizes, t, workload.popularity, settings.seed, device)]
    draw = torch.Generator().manual_seed(settings.seed)
    rows = torch.stack([torch.randn(t, spec.d_model, generator=draw) for _ in picks])
    dtype = torch.float32 if shape is None and device.type == "cpu" else torch.bfloat16
    return Cell(layer, rows.to(device, dtype), picks, case, workload.options)


def _shape_cells(shape: LayerShape, workload: Workload, settings: Settings) -> Iterator[Planned]:
    device = _device(workload)
    formats = SERVED if workload.formats is None else workload.formats
    tokens = _tokens(workload, TOKENS[device.type])
    several = isinstance(formats, Iterable) and not isinstance(formats, str)
    names: tuple[Format, ...] = tuple(formats) if several else (formats,)  # type: ignore[assignment]
    for name in names:
        split_format(name)
    for name in names:
        layer = cache(partial(make_layer, shape, name, str(device), settings.seed))  # one for every T, none kept longer
        why = unfit(shape, name)
        for t in tokens:
            case = case_of(shape, workload.name or workload.popularity, t)
            build = partial(_from_shape, layer, shape, t, case, workload, settings)
            yield Planned(case, format_label(name), device, build, why)


def _from_shape(
    make: Callable[[], MoELayer], shape: LayerShape, t: int, case: Case, workload: Workload, settings: Settings
) -> Cell:
    return _drawn(make(), t, case, workload, settings, shape)
