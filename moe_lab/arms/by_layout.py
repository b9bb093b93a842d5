"""The decode kernels on q8_1 rows by the layout that experts are kept in: one row a layout, one signature.

Integers are the same in every layout. raw and planar add floats in one order where a format's lanes walk its values
alike (q4_k, q5_k, q4_0, mxfp4, nvfp4: the same bits), planar q2_k, q3_k, q6_k and q8_0, and tiles, in orders of their
own: last bits differ from raw's. Within a layout a row has the same bits alone, in chunks and by every route.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from moe_lab._types import Tensor
from moe_lab.formats.layouts import RAW
from moe_lab_kernels.gemv import gemv, lane_rows, mlp
from moe_lab_kernels.gemv.tiled import mlp as tiled_mlp
from moe_lab_kernels.gemv.tiled import sum_rows, tiled


class Kernels(NamedTuple):
    """`quantize(x, format)`: rows as the products read them; `product(rows, row_of, w, chunks, format, out, *, out_row,
    max_rows)` and `mlp`: as `gemv.gemv` and `mlp.gemv_mlp`, on weights as `ExpertStack.weights` gives them."""

    quantize: Callable[[Tensor, str], Any]
    product: Callable[..., Tensor]
    mlp: Callable[..., Tensor]


def kernels_for(layout: str) -> Kernels:
    """The row of a layout."""
    return _ROWS[layout]()


_ROWS: dict[str, Callable[[], Kernels]] = {
    RAW: lambda: Kernels(lane_rows.quantize_lanes, gemv.gemv, mlp.gemv_mlp),
    "planar": lambda: Kernels(
        partial(lane_rows.quantize_lanes, layout="planar"),
        partial(gemv.gemv, layout="planar"),
        partial(mlp.gemv_mlp, layout="planar"),
    ),
    "tiles": lambda: Kernels(lambda x, format: sum_rows.quantize_sums(x), tiled.gemv_tiled, tiled_mlp.gemv_tiled_mlp),
}
