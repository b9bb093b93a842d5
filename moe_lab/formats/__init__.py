"""Weight formats by name, and the tensors that carry them."""

from moe_lab._types import Tensor
from moe_lab.formats.activations import Q81Rows, quantize_q8_1
from moe_lab.formats.base import BlockFormat, IntegerForm, QuantTensor, WeightFormat, lookup
from moe_lab.formats.dense import BF16, F16, F32, DenseFormat
from moe_lab.formats.kquants import Q2_K_FORMAT, Q3_K_FORMAT
from moe_lab.formats.legacy import Q8_0_FORMAT

_ALL: tuple[WeightFormat, ...] = (F32, F16, BF16, Q8_0_FORMAT, Q2_K_FORMAT, Q3_K_FORMAT)
FORMATS: dict[str, WeightFormat] = {f.name: f for f in _ALL}


def get_format(format: str | WeightFormat) -> WeightFormat:
    """A format by name, or the user's own object unchanged. LabError for an unknown name."""
    return lookup(FORMATS, format)


def quantize(w: Tensor, format: str | WeightFormat) -> QuantTensor:
    """Encode w [.., N, Kd] row by row. LabError when Kd is no multiple of the block or w is not finite."""
    from moe_lab.errors import LabError

    codec = get_format(format)
    codec.row_bytes(w.shape[-1])
    if not bool(w.isfinite().all()):
        bad = int((~w.isfinite()).sum())
        raise LabError(f"cannot quantise to {codec.name}: {bad} of {w.numel()} weights are NaN or infinite.")
    return QuantTensor(codec.quantize(w.float()), codec.name, tuple(w.shape), codec)


__all__ = [
    "FORMATS", "BlockFormat", "DenseFormat", "IntegerForm", "Q81Rows", "QuantTensor", "WeightFormat",
    "get_format", "quantize", "quantize_q8_1",
]  # fmt: skip
