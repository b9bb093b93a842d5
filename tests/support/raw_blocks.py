"""Raw block rows whose codes and sub-scales are random bytes and whose floats are ordinary numbers."""

import torch

from moe_lab_kernels.storage.blocks import BLOCKS

FLOATS_AT = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82), "q3_k": (108,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,), "mxfp4": (), "nvfp4": (),
}  # fmt: skip


def plain_rows(format: str, rows: int, blocks: int, seed: int = 0) -> torch.Tensor:
    """uint8 [rows, blocks * block bytes]: every value finite and about 1."""
    draw = torch.Generator().manual_seed(seed)
    raw = torch.randint(256, (rows, blocks, BLOCKS[format].bytes), generator=draw, dtype=torch.uint8)
    for at in FLOATS_AT[format]:
        raw[..., at : at + 2] = (torch.rand(rows, blocks, 1, generator=draw) / 64 + 1e-3).half().view(torch.uint8)
    if format == "mxfp4":
        raw[..., 0] = raw[..., 0] % 8 + 120
    if format == "nvfp4":
        raw[..., :4] = raw[..., :4] % 64
    return raw.flatten(1)
