"""Weight formats by name, and the tensors that carry them."""

from moe_lab._types import Tensor
from moe_lab.checks import wants_tensor
from moe_lab.errors import LabError, LabTypeError
from moe_lab.formats.activation_blocks import from_blocks, to_blocks
from moe_lab.formats.activations import (
    ActivationLayout,
    Arithmetic,
    QuantRows,
    quantize_activations,
    quantize_q8_1,
)
from moe_lab.formats.affine import AFFINE
from moe_lab.formats.base import BlockFormat, IntegerForm, OwnFormat, WeightFormat, lookup
from moe_lab.formats.dense import BF16, F16, F32, DenseFormat
from moe_lab.formats.fp4 import NVFP4_CT, NVFP4_MODELOPT
from moe_lab.formats.fp8 import FP8_BLOCK
from moe_lab.formats.fused import split_gate_up
from moe_lab.formats.kquants import Q2_K_FORMAT, Q3_K_FORMAT, Q4_K_FORMAT, Q5_K_FORMAT, Q6_K_FORMAT
from moe_lab.formats.legacy import (
    IQ4_NL_FORMAT,
    IQ4_XS_FORMAT,
    MXFP4_FORMAT,
    NVFP4_FORMAT,
    Q4_0_FORMAT,
    Q4_1_FORMAT,
    Q5_0_FORMAT,
    Q5_1_FORMAT,
    Q8_0_FORMAT,
)
from moe_lab.formats.mx import MXFP4_OSS, MXFP8
from moe_lab.formats.planar import Planar
from moe_lab.formats.quant_tensor import QuantTensor
from moe_lab.formats.repacked import Repacked
from moe_lab.formats.scaled import Flaw, Parts, ScaledFormat
from moe_lab.formats.tiled import Tiled

_ALL: tuple[OwnFormat, ...] = (
    F32, F16, BF16, Q8_0_FORMAT, Q4_0_FORMAT, Q4_1_FORMAT, Q5_0_FORMAT, Q5_1_FORMAT,
    Q2_K_FORMAT, Q3_K_FORMAT, Q4_K_FORMAT, Q5_K_FORMAT, Q6_K_FORMAT,
    IQ4_NL_FORMAT, IQ4_XS_FORMAT, MXFP4_FORMAT, NVFP4_FORMAT,
    FP8_BLOCK, NVFP4_MODELOPT, NVFP4_CT, MXFP4_OSS, MXFP8, *AFFINE,
)  # fmt: skip
_HALF_MAX = 65504.0  # scales are smaller than weights, so up to here even those kept as halves are finite
FORMATS: dict[str, OwnFormat] = {f.name: f for f in _ALL}


def get_format(format: str | WeightFormat) -> WeightFormat:
    """A format by name, or the user's own object unchanged. LabError for an unknown name."""
    return lookup(FORMATS, format)


def quantize(w: Tensor, format: str | WeightFormat, *, fallback: str | WeightFormat | None = None) -> QuantTensor:
    """Encode w [.., N, Kd] row by row. Where Kd is no multiple of the format's block, `fallback` (if given) is taken
    instead; the result's `.format` says which it was. LabError when Kd is no multiple of the block, w is not finite, or
    a weight is too large for the format's scales; LabTypeError for what is no tensor of floating point weights."""
    codec = get_format(format)
    other = None if fallback is None else get_format(fallback)
    wants_tensor("w", w)
    if not w.is_floating_point() or w.ndim < 1:
        raise LabTypeError(f"w is {w.dtype} of shape {list(w.shape)}; wanted floating point weights [.., N, Kd].")
    if other is not None and (w.shape[-1] < codec.block or w.shape[-1] % codec.block):
        codec = other
    codec.row_bytes(w.shape[-1])
    largest = float(w.detach().float().abs().max()) if w.numel() else 0.0
    if not largest < float("inf"):
        bad = int((~w.float().isfinite()).sum())
        raise LabError(f"cannot quantise to {codec.name}: {bad} of {w.numel()} weights are NaN or infinite in float32.")
    if largest > (most := getattr(codec, "largest", float("inf"))):
        raise LabError(
            f"cannot quantise to {codec.name}: weights up to {largest:.5g}, but its scales hold {most:g} at most. "
            "Scale them down first, or take a format with a scale of its own for the tensor."
        )
    made = QuantTensor.encode(w, codec)
    if largest > _HALF_MAX and made.first_flaw() is not None:
        raise LabError(
            f"cannot quantise to {codec.name}: weights up to {largest:.3g} overflow its scales. Scale them down first."
        )
    return made


__all__ = [
    "FORMATS", "ActivationLayout", "Arithmetic", "BlockFormat", "DenseFormat", "Flaw", "IntegerForm", "Parts",
    "Planar", "QuantRows", "QuantTensor", "Repacked", "ScaledFormat", "Tiled", "WeightFormat",
    "from_blocks", "get_format", "quantize", "quantize_activations", "quantize_q8_1", "split_gate_up",
    "to_blocks",
]  # fmt: skip
