"""Writes tests/oracles/recorded/scaled_formats.npz: what the makers of NVFP4 (compressed-tensors) and affine groups
(MLX) files make of the same weights, and which values they read from them.

    pip install compressed-tensors "mlx[cpu]" && PYTHONPATH=.:kernels python tests/support/record_scaled_oracles.py

The packages are large and have nothing else to do here, so their answers are kept and they are not installed to test.
"""

# pyright: reportMissingImports=false

from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.quant_args import QuantizationArgs
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

from tests.support.scaled_cases import heavy_tailed

OUT = Path(__file__).resolve().parents[1] / "oracles" / "recorded" / "scaled_formats.npz"


def by_compressed_tensors(w: torch.Tensor) -> dict[str, np.ndarray]:
    args = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True, dynamic=False,
        scale_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    whole = generate_gparam(w.min(), w.max())
    groups = w.unflatten(-1, (-1, 16))
    scales, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=whole)
    codes = quantize(w, scales, zero, args, global_scale=whole)
    values = dequantize(codes, scales, zero, args, global_scale=whole, dtype=torch.float32)
    parts = {
        "data": pack_fp4_to_uint8(codes), "global_scale": whole, "values": values,
        "scales": scales.to(torch.float8_e4m3fn).view(torch.uint8),
    }  # fmt: skip
    return {f"nvfp4_ct/{name}": t.numpy() for name, t in parts.items()}


def by_mlx(w: torch.Tensor, bits: int, group: int) -> dict[str, np.ndarray]:
    mx.set_default_device(mx.cpu)
    data, scales, biases = mx.quantize(mx.array(w.numpy()), group_size=group, bits=bits)
    values = mx.dequantize(data, scales, biases, group_size=group, bits=bits)
    parts = {"data": data, "scales": scales, "biases": biases, "values": values}
    return {f"int{bits}_g{group}/{name}": np.array(t) for name, t in parts.items()}


def main() -> None:
    w = heavy_tailed((8, 256), seed=11)
    w[1, :32], w[2], w[3, 100] = 0.0, w[2].abs(), -0.7
    record = {"w": w.numpy(), **by_compressed_tensors(w)}
    for bits, group in ((4, 32), (4, 64), (4, 128), (8, 32), (8, 128)):
        record |= by_mlx(w, bits, group)
    made_by = [f"{name} {version(name)}" for name in ("compressed-tensors", "mlx", "torch")]
    np.savez_compressed(OUT, made_by=np.array(made_by), **record)


if __name__ == "__main__":
    main()
