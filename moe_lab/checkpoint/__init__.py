"""Tensor files, read without trust.

A file is checked whole before anything is made of it: every count against the bytes there are, every tensor against
the file's end and its neighbours, in exact integers. What fails is a `CheckpointError` that names the file, the tensor
where there is one, what came, what was wanted, and a `reason` of one fixed word:

not found, unreadable, unsupported, truncated, changed, magic, version, count, text, value, value type, nesting,
alignment, duplicate, dimensions, shape, row length, tensor type, offset, overlap, header length, header text, dtype,
size, hole in the data, path, config, scale shape, scale names, missing part, part mismatch, missing tensor,
missing key, model shape; of packed experts: checksum, manifest.

`open_tensor_file` takes any of them: a GGUF, split or not; a safetensors file, an index of several, or a folder. Both
readers are a `TensorFile`, so what is built on them does not ask which it was.
"""

from moe_lab.checkpoint.folder import open_tensor_file
from moe_lab.checkpoint.gguf import GgufFile
from moe_lab.checkpoint.safetensors import SafetensorsFile
from moe_lab.checkpoint.tensor_file import TensorFile
from moe_lab.checkpoint.tensor_info import ScaledInfo, TensorInfo

__all__ = ["GgufFile", "SafetensorsFile", "ScaledInfo", "TensorFile", "TensorInfo", "open_tensor_file"]
