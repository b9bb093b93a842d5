"""A cost model of streamed layers: milliseconds from misses and bytes, calibrated by this machine's own record.

For one call of a layer that reads m experts, B bytes in all:
    wall  = route + compute + other + fetch            medians of the layer's calls, but for fetch
    fetch = idle                                       m = 0: leases and locks
    fetch = start + B / speed                          m > 0: a straight line through the medians at each B
Where the machine was calibrated (`moe-lab calibrate`), 1 / speed is split into the disk's and the copy's share, which
go side by side (the slower one counts), and the rest: work of the host that faster hardware will not save.
Time that hides behind computation is not in fetch, as `moe_lab.timing` counts it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_lab.checks import wants_number
from moe_lab.errors import LabError

if TYPE_CHECKING:
    import pandas as pd

NEEDED = ("layer", "misses", "bytes_read", "route_ms", "fetch_ms", "compute_ms", "other_ms")
PARTS = ("route_ms", "fetch_ms", "compute_ms", "other_ms")


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Medians of one layer's calls, and the file bytes of one of its experts."""

    route_ms: float
    compute_ms: float
    other_ms: float
    expert_bytes: float


@dataclass(frozen=True, slots=True)
class FetchCost:
    """What reading costs: ms for a call without misses and for one with, and ms a byte by who spends it."""

    idle_ms: float
    start_ms: float
    disk_ms_per_byte: float
    copy_ms_per_byte: float
    host_ms_per_byte: float

    @property
    def ms_per_byte(self) -> float:
        """Disk and copy side by side, the host's work in front."""
        return max(self.disk_ms_per_byte, self.copy_ms_per_byte) + self.host_ms_per_byte

    def ms(self, nbytes: np.ndarray) -> np.ndarray:
        """Fetch time of calls that read so many bytes."""
        return np.where(nbytes > 0, self.start_ms + nbytes * self.ms_per_byte, self.idle_ms)


@dataclass(frozen=True, slots=True)
class Cost:
    """The model. `Cost.fit` makes one from timings; `dataclasses.replace` and `scaled` vary it."""

    layers: Mapping[int, LayerCost]
    fetch: FetchCost

    @classmethod
    def fit(
        cls, timings: "pd.DataFrame", *, disk_gb_per_s: float | None = None, copy_gb_per_s: float | None = None
    ) -> "Cost":
        """From `rec.timings` of a streamed run (a row a call, columns `NEEDED`).

        `disk_gb_per_s`, `copy_gb_per_s`: calibrated speeds, 10^9 bytes/s (`load_calibration().disk_of(path)`); without
        them the whole slope counts as the disk's. Reads that were faster than the calibrated disk came from the page
        cache: the slope that was measured is then all there is. LabError for a record without misses.
        """
        _need(timings)
        read: Any = timings[timings["misses"] > 0]
        if not len(read):
            raise LabError("Cost.fit: no call of these timings read an expert; record a run with a smaller cache.")
        by_layer: Any = timings.groupby("layer")
        layers = {int(n): _layer_cost(rows, read) for n, rows in by_layer}
        idle = timings.loc[timings["misses"] == 0, "fetch_ms"]
        start, slope = _line(read["bytes_read"].to_numpy(float), read["fetch_ms"].to_numpy(float))
        disk, copy = (min(slope, _ms_per_byte(speed)) for speed in (disk_gb_per_s, copy_gb_per_s))
        if disk_gb_per_s is None and copy_gb_per_s is None:
            disk = slope
        fetch = FetchCost(float(idle.median()) if len(idle) else 0.0, start, disk, copy, slope - max(disk, copy))
        return cls(layers, fetch)

    def scaled(
        self, *, disk: float = 1.0, copy: float = 1.0, compute: float = 1.0, expert_bytes: float = 1.0
    ) -> "Cost":
        """With disk, host-to-device link and arithmetic so many times as fast, experts so many times as large."""
        for name, factor in (("disk", disk), ("copy", copy), ("compute", compute), ("expert_bytes", expert_bytes)):
            wants_number(name, factor)
            if not 0 < factor < float("inf"):
                raise LabError(f"Cost.scaled: {name}={factor}; wanted a factor above 0.")
        layers = {
            n: replace(one, compute_ms=one.compute_ms / compute, expert_bytes=one.expert_bytes * expert_bytes)
            for n, one in self.layers.items()
        }
        now = self.fetch
        fetch = replace(now, disk_ms_per_byte=now.disk_ms_per_byte / disk, copy_ms_per_byte=now.copy_ms_per_byte / copy)
        return Cost(layers, fetch)

    def predict(self, counts: "pd.DataFrame") -> "pd.DataFrame":
        """Milliseconds of each row of `counts` (columns layer and misses, as `moe_lab.simulate.steps` has them): its
        columns, bytes_read, the four parts and wall_ms. LabError for a layer that the model does not know.
        """
        unknown = sorted(set(counts["layer"]) - set(self.layers))
        if unknown:
            raise LabError(f"the cost model knows layers {sorted(self.layers)}, not {unknown}.")
        number = counts["layer"].to_numpy()
        column = {
            name: np.array([getattr(self.layers[int(n)], name) for n in number])
            for name in ("route_ms", "compute_ms", "other_ms", "expert_bytes")
        }
        nbytes = counts["misses"].to_numpy() * column.pop("expert_bytes")
        found = counts.assign(bytes_read=nbytes, fetch_ms=self.fetch.ms(nbytes), **column)
        return found.assign(wall_ms=found[list(PARTS)].sum(axis=1))

    def residuals(self, timings: "pd.DataFrame") -> "pd.DataFrame":
        """A row for each call: layer, misses, measured_ms, predicted_ms, residual_ms (measured - predicted)."""
        _need(timings)
        asked: Any = timings[["layer", "misses"]]
        predicted = self.predict(asked)["wall_ms"].to_numpy()
        measured = timings[list(PARTS)].sum(axis=1).to_numpy()
        return asked.assign(measured_ms=measured, predicted_ms=predicted, residual_ms=measured - predicted)


def held_out(timings: "pd.DataFrame", **speeds: Any) -> "pd.DataFrame":
    """How well every other call of a record foretells the rest: a row a layer, and a last one ("all") for their sum.

    Every other one, so that a machine that slows down meanwhile does not count as an error of the model.

    Columns: layer, calls, measured_ms, predicted_ms (medians a call), error (predicted / measured - 1), spread (median
    absolute residual / measured). `speeds` go to `Cost.fit`. The rows of each layer must stand in the order of time.
    """
    _need(timings)
    place: Any = timings.groupby("layer").cumcount()
    seen, unseen = (timings[rows] for rows in (place % 2 == 0, place % 2 == 1))
    rest: Any = Cost.fit(seen, **speeds).residuals(unseen)  # type: ignore[arg-type]
    if not len(rest):
        raise LabError("held_out needs two calls a layer at least: one to fit, one to foretell.")
    rows: list[dict[str, Any]] = []
    for layer, one in rest.groupby("layer"):
        measured, predicted = one["measured_ms"].median(), one["predicted_ms"].median()
        spread = one["residual_ms"].abs().median() / measured
        rows.append(_held_row(layer, len(one), measured, predicted, spread))
    total = {name: sum(row[name] for row in rows) for name in ("calls", "measured_ms", "predicted_ms")}
    spread = sum(row["spread"] * row["measured_ms"] for row in rows) / total["measured_ms"]
    rows.append(_held_row("all", total["calls"], total["measured_ms"], total["predicted_ms"], spread))
    import pandas as pd

    return pd.DataFrame(rows)


def _held_row(layer: Any, calls: int, measured: float, predicted: float, spread: float) -> dict[str, Any]:
    return {
        "layer": layer, "calls": calls, "measured_ms": measured, "predicted_ms": predicted,
        "error": predicted / measured - 1, "spread": spread,
    }  # fmt: skip


def _need(timings: Any) -> None:
    columns = getattr(timings, "columns", None)
    if columns is None:
        raise LabError(f"a cost model is made from a DataFrame of timings (rec.timings), got {type(timings).__name__}.")
    if missing := [name for name in NEEDED if name not in columns]:
        raise LabError(f"timings lack {', '.join(missing)}; rec.timings of a streamed run has them.")
    if empty := [name for name in NEEDED if not len(timings) or bool(timings[name].isna().any())]:
        raise LabError(f"timings have no value in {', '.join(empty)}: level 0 records no phases; replay at level 1.")


def _layer_cost(rows: Any, read: Any) -> LayerCost:
    mine = rows[rows["misses"] > 0]
    sized = mine if len(mine) else read  # a layer that never missed: the other layers' size
    size = float(sized["bytes_read"].sum() / sized["misses"].sum())
    route, compute, other = (float(rows[name].median()) for name in ("route_ms", "compute_ms", "other_ms"))
    return LayerCost(route, compute, other, size)


def _line(nbytes: np.ndarray, ms: np.ndarray) -> tuple[float, float]:
    """Intercept and slope, neither below 0, through the medians at each number of bytes, weighed by their calls.

    Medians, as a read that met a busy disk may take a hundred times as long and says nothing about the next one.
    """
    sizes, place = np.unique(nbytes, return_inverse=True)
    middle = np.array([np.median(ms[place == i]) for i in range(len(sizes))])
    weight = np.bincount(place).astype(float)
    slope = 0.0
    if len(sizes) > 1:
        x, y = sizes - np.average(sizes, weights=weight), middle - np.average(middle, weights=weight)
        slope = max(0.0, float((weight * x * y).sum() / (weight * x * x).sum()))
    start = float(np.average(middle - slope * sizes, weights=weight))
    if slope == 0.0 or start < 0:
        return 0.0, float((weight * sizes * middle).sum() / (weight * sizes * sizes).sum())
    return start, slope


def _ms_per_byte(gb_per_s: float | None) -> float:
    if gb_per_s is None:
        return 0.0
    if not gb_per_s > 0:
        raise LabError(f"a speed of {gb_per_s} GB/s: wanted above 0.")
    return 1e-6 / gb_per_s
