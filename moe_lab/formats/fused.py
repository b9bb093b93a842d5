"""Gate and up out of one fused table [.., 2F, Kd] of a format with separate scales.

Each half owns its rows of scales and may have a global scale of its own. A table whose scales were laid over all 2F
rows at once would read up's first rows with gate's last scale where F is no multiple of the rows that share one.
"""

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab.formats.quant_tensor import QuantTensor
from moe_lab_kernels.storage.scaled_layouts import layout_of


def split_gate_up(
    format: str,
    shape: tuple[int, ...],
    data: Tensor,
    scales: Tensor,
    global_scale: Tensor | None = None,
    biases: Tensor | None = None,
) -> tuple[QuantTensor, QuantTensor]:
    """Gate and up [.., F, Kd] of a table of logical `shape` [.., 2F, Kd], gate first.

    fp8_block: each half has ceil(F / 128) rows of scales, so 4 for F = 192, where one table of 2F rows would have 3.
    `global_scale`: one, one a matrix [..], or one for each half [.., 2]. LabError for a table of any other length.
    """
    rows = layout_of(format).rows
    if len(shape) < 2 or shape[-2] % 2:
        raise LabError(f"a fused gate and up has an even number of rows, got shape {tuple(shape)}.")
    f = shape[-2] // 2
    each, half = -(-f // rows), (*shape[:-2], f, shape[-1])
    for name, t in (("scales", scales), ("biases", biases)):
        if t is not None and (t.ndim < 2 or t.shape[-2] != 2 * each):
            raise LabError(
                f"gate and up of {f} rows each have {each} rows of {format} {name}, so {2 * each} in a fused table; "
                f"got {name} {list(t.shape)}. Keep the halves apart."
            )
    pair = global_scale is not None and tuple(global_scale.shape) == (*shape[:-2], 2)

    def part(index: int) -> QuantTensor:
        codes, blocks = slice(index * f, (index + 1) * f), slice(index * each, (index + 1) * each)
        whole = global_scale[..., index] if pair and global_scale is not None else global_scale
        bias = None if biases is None else biases[..., blocks, :]
        return QuantTensor.from_parts(data[..., codes, :], scales[..., blocks, :], whole, format, half, biases=bias)

    return part(0), part(1)
