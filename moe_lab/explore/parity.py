"""Explorer of parity: how far two arms lie apart, by number of rows, arms, layer, and size of the rows."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import Any

from moe_lab._types import Tensor
from moe_lab.arms import Arm
from moe_lab.errors import LabError
from moe_lab.explore.grid import GridExplorer
from moe_lab.layer import MoELayer
from moe_lab.numerics.distance import error_bins
from moe_lab.parity.stored import on
from moe_lab.plots import parity as plot_parity
from moe_lab.plots.style import LabFigure, plt, style


def parity(
    layers: Mapping[int, MoELayer],
    rows: Callable[[int], Tensor],
    *,
    arms: Sequence[str | Arm] = ("gemv", "mmq", "reference"),
    tokens: Sequence[int] = (8, 256),
    scales: Sequence[float] = (1e-5, 1.0),
) -> GridExplorer:
    """Histogram of |a - b| / rms(b) for every pair of `arms`, on the first T of `rows(number)` [T, D] times a scale.

    The scale leaves a row's shape and with it every code as they are; only what fp16 makes of scales and sums changes.
    Arms as `lab.compare` names them: "gemv", "mmq@planar", "gemv:q4_k" (the experts quantised to another format).
    Picks are those of the unscaled rows. Values that are not finite on either side are left out, and the title says how
    many. LabError as GridExplorer, and for fewer than two arms.
    """
    names = [arm if isinstance(arm, str) else arm.name for arm in arms]
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise LabError(f"an explorer of parity wants two arms or more, each once; got {', '.join(names) or 'none'}.")

    @cache
    def output(count: int, name: str, number: int, scale: float) -> Tensor:
        x = rows(number)[:count]
        own, arm = on(layers[number], arms[names.index(name)])
        return own(x * scale, arm, routing=layers[number].route(x)).out.cpu()

    def frame(count: int, pair: tuple[str, str], number: int, scale: float) -> LabFigure:
        a, b = (output(count, name, number, scale) for name in pair)
        return parity_frame(a, b, *pair)

    values: dict[str, Sequence[Any]] = {
        "T": tokens, "arms": list(combinations(names, 2)), "layer": list(layers), "scale": scales
    }  # fmt: skip
    start = (len(tokens) - 1, 0, 0, list(scales).index(1.0) if 1.0 in scales else 0)
    return GridExplorer(values, frame, show={"arms": " / ".join, "scale": lambda s: f"{s:g}"}, start=start)


def parity_frame(a: Tensor, b: Tensor, arm_a: str, arm_b: str) -> LabFigure:
    """One frame, placed by hand: matplotlib's constrained layout takes as long as drawing, and a page holds dozens."""
    finite = a.isfinite() & b.isfinite()
    lost = int((~finite).sum())
    with style():
        figure: Any = plt.figure(FigureClass=LabFigure, figsize=(8.0, 3.3))
        axes = figure.add_axes((0.08, 0.17, 0.90, 0.62))
    if lost == a.numel():
        axes.text(0.5, 0.5, "no value is finite on both sides", ha="center", va="center", transform=axes.transAxes)
        figure.alt = f"{arm_a} / {arm_b}: none of {lost} values is finite on both sides."
        return figure
    plot_parity(error_bins(a[finite], b[finite], arm_a=arm_a, arm_b=arm_b), ax=axes)
    axes.minorticks_off()  # a third of the time of drawing
    if lost:
        axes.set_title(f"{axes.get_title(loc='left')}; {lost} of {a.numel()} values not finite", loc="left", pad=26)
        figure.alt += f" {lost} of {a.numel()} values are not finite."
    return figure
