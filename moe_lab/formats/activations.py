"""Activation rows as the int8 and fp8 arms multiply them.

Layouts by name: `q8_1` (decode arm), `d4`, `ds4`, `d2s6` (ggml's prefill arm), `q8_k`, `q8_0` (its CPU arm), `fp8`
(e4m3, a scale for each 128 values). `Arithmetic` switches single choices: the block that shares a scale, the scale's
dtype, which sums are kept and as what, how codes are rounded. The arithmetic itself is described and done in
moe_lab_kernels (quantize_rows, quantize_fp8): the Triton kernel and the torch reference give the same bits.
"""

from dataclasses import dataclass, replace

import torch

from moe_lab._types import Float, Float32, Tensor
from moe_lab_kernels.rows.arithmetic import ActivationLayout, Arithmetic, layout_of


@dataclass(frozen=True, slots=True, eq=False)
class QuantRows:
    """R quantised rows of `width` values, padded with zeros to Kp, a multiple of the layout's unit (2880 values stay
    2880 in q8_1, become 2944 in d4, ds4, d2s6 and fp8, and 3072 in q8_k).

    codes int8 or float8_e4m3fn [R, Kp]; scale fp16, bf16 or fp32 [R, Kp / block]; total [R, sums], one sum for each
    `layout.sum_group` values (of d2s6's raw sums the first 6 of every 8), fp16, bf16, fp32, or int16 for safe sums;
    None where the layout keeps none. `layout` says every choice made (`layout.name`, `layout.rounding`, ..).
    """

    codes: Tensor
    scale: Tensor
    total: Tensor | None
    layout: ActivationLayout
    width: int

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: Tensor | slice) -> "QuantRows":
        """The rows of a slice or of an index tensor [R']."""
        total = None if self.total is None else self.total[index]
        return replace(self, codes=self.codes[index], scale=self.scale[index], total=total)

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        """(codes, scale), what a product without stored sums reads."""
        return self.codes, self.scale

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and sums."""
        return sum(t.nbytes for t in (self.codes, self.scale, self.total) if t is not None)

    def dequantize(self) -> Float32[Tensor, "R Kd"]:
        """code * stored scale in fp32."""
        values = self.codes.float().unflatten(1, (self.scale.shape[1], -1)) * self.scale.float().unsqueeze(-1)
        return values.flatten(1)[:, : self.width]

    def overflowed(self) -> Tensor:
        """How many stored sums are infinite (int64, 0-d, on the rows' device): an fp16 sum past 65504, or an infinite
        value. ggml multiplies these all the same; `Arithmetic(safe_sum=True)` has none."""
        if self.total is None or not self.total.is_floating_point():
            return torch.zeros((), dtype=torch.int64, device=self.codes.device)
        return self.total.isinf().sum()


def quantize_activations(x: Float[Tensor, "R Kd"], layout: str, arithmetic: Arithmetic | None = None) -> QuantRows:
    """Quantise fp32, fp16 or bf16 rows to a layout. The kernel where one serves x, torch elsewhere.

    `arithmetic` changes single choices of the layout (None: none). LabError when Kd is no positive multiple of 32, for
    an unknown layout and for choices that it cannot have; LabTypeError for another dtype.
    """
    from moe_lab_kernels import backend
    from moe_lab_kernels.rows import quantize_fp8, quantize_rows

    made = layout_of(layout, arithmetic)
    in_torch = backend.backend_of(x) == "torch"
    if layout == "fp8":
        fp8 = quantize_fp8.quantize_fp8_ref if in_torch else quantize_fp8.quantize_fp8
        codes, scale = fp8(x, arithmetic)
        total = None
    else:
        int8 = quantize_rows.quantize_int8_ref if in_torch else quantize_rows.quantize_int8
        codes, scale, total = int8(x, layout, arithmetic)
    return QuantRows(codes, scale, total, made, x.shape[1])


def quantize_q8_1(x: Float[Tensor, "R Kd"]) -> QuantRows:
    """Rows as the decode arm reads them: `quantize_activations(x, "q8_1")`."""
    return quantize_activations(x, "q8_1")
