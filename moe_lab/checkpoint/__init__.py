"""Tensor files, read without trust.

A file is checked whole before anything is made of it: every count against the bytes there are, every tensor against
the file's end and its neighbours, in exact integers. What fails is a `CheckpointError` that names the file, the tensor
where there is one, what came, what was wanted, and a `reason` of one fixed word:

not found, unreadable, unsupported, truncated, changed, magic, version, count, text, value, value type, nesting,
alignment, duplicate, dimensions, shape, row length, tensor type, offset, overlap, missing part, missing tensor,
missing key, model shape.
"""

from moe_lab.checkpoint.gguf import GgufFile
from moe_lab.checkpoint.gguf_header import TensorInfo

__all__ = ["GgufFile", "TensorInfo"]
