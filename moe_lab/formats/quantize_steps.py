"""The walk of the encoders over chunks of blocks, and the turns between blocks and columns of values.

k-quant encoders work on columns: a chunk of S sub-blocks of n values lies as [n, S], so that what C does to the values
of one sub-block one after another is done to S of them at once.
"""

from collections.abc import Callable

import torch

from moe_lab._types import Float32, Tensor, UInt8
from moe_lab.formats.base import check_whole_blocks
from moe_lab_kernels.storage.blocks import BLOCKS

# Values a chunk. CPU: some forty operations of one to ten microseconds a step must be shared by many blocks, and the
# working arrays (2 MiB each) should stay in L3: q3_k took 74, 50 and 40 ms for 2^20 values at 2^17, 2^18 and 2^19.
# CUDA: an operation on 2^25 values takes ten launches' time, so the launches of the ordered sums are hidden.
CHUNK = {"cpu": 1 << 19, "cuda": 1 << 25}


@torch.no_grad()
def quantize_blocks(
    w: Float32[Tensor, "*rows Kd"],
    name: str,
    encode: Callable[[Float32[Tensor, "B block"]], UInt8[Tensor, "B block_bytes"]],
) -> UInt8[Tensor, "*rows row_bytes"]:
    """Encode whole rows, CHUNK values at a time. LabError when Kd is no multiple of the block."""
    block, block_bytes = BLOCKS[name].values, BLOCKS[name].bytes
    check_whole_blocks(name, block, w.shape[-1])
    flat = w.reshape(-1, block)
    _keep_freed_memory(w.device)
    out = torch.empty(len(flat), block_bytes, dtype=torch.uint8, device=w.device)
    at_once = max(1, CHUNK.get(w.device.type, CHUNK["cuda"]) // block)
    for start in range(0, len(flat), at_once):
        part = slice(start, start + at_once)
        out[part] = encode(flat[part].float())
    return out.view(*w.shape[:-1], w.shape[-1] // block * block_bytes)


def _keep_freed_memory(device: torch.device) -> None:
    """Have glibc reuse the working arrays: it maps large ones afresh until a larger one was freed (32 MiB at most).

    Without this the page faults of one megabyte arrays took half of q3_k's time. Elsewhere it does nothing.
    """
    if device.type == "cpu":
        torch.empty(31 << 20, dtype=torch.uint8)


def columns(x: Float32[Tensor, "B block"], n: int) -> Float32[Tensor, "n S"]:
    """Sub-blocks of n values as columns, in order: S = B * block / n."""
    return x.reshape(-1, n).t().contiguous()


def rows(codes: Float32[Tensor, "n S"], block: int) -> UInt8[Tensor, "B block"]:
    """Columns of codes 0..127 back to blocks, in element order."""
    return small_bytes(codes).t().reshape(-1, block)


def small_bytes(codes: Float32[Tensor, "*some"]) -> UInt8[Tensor, "*some"]:
    """Values -128..127 truncated to bytes. By way of int8: torch's cast to uint8 takes four times as long on a CPU."""
    return codes.to(torch.int8).view(torch.uint8)
