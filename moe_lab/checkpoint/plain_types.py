"""Tensor types without blocks: the words of a safetensors header, their bits, and what torch holds them as."""

from typing import NamedTuple

import torch


class PlainType(NamedTuple):
    """Bits of one element, and torch's dtype for it: None where torch has no dtype with one element an entry."""

    bits: int
    torch: torch.dtype | None


# The words of the safetensors format. F4 and F6 count elements, of which several share bytes.
SAFETENSORS_TYPES: dict[str, PlainType] = {
    "F64": PlainType(64, torch.float64), "F32": PlainType(32, torch.float32), "F16": PlainType(16, torch.float16),
    "BF16": PlainType(16, torch.bfloat16), "C64": PlainType(64, torch.complex64),
    "F8_E4M3": PlainType(8, torch.float8_e4m3fn), "F8_E5M2": PlainType(8, torch.float8_e5m2),
    "F8_E4M3FNUZ": PlainType(8, torch.float8_e4m3fnuz), "F8_E5M2FNUZ": PlainType(8, torch.float8_e5m2fnuz),
    "F8_E8M0": PlainType(8, torch.float8_e8m0fnu),
    "F6_E2M3": PlainType(6, None), "F6_E3M2": PlainType(6, None), "F4": PlainType(4, None),
    "I64": PlainType(64, torch.int64), "I32": PlainType(32, torch.int32), "I16": PlainType(16, torch.int16),
    "I8": PlainType(8, torch.int8), "U64": PlainType(64, torch.uint64), "U32": PlainType(32, torch.uint32),
    "U16": PlainType(16, torch.uint16), "U8": PlainType(8, torch.uint8), "BOOL": PlainType(8, torch.bool),
}  # fmt: skip

# By the lab's name for a format: the word in lower case, which for f32, bf16, i64 and so on is also what GGUF says.
PLAIN: dict[str, torch.dtype] = {name.lower(): t.torch for name, t in SAFETENSORS_TYPES.items() if t.torch is not None}
