"""Writing a GGUF through the `gguf` package: tensors as they are, metadata as Python values, the file in one step.

Knows nothing of families: `moe_lab.export` says which names and keys a MoE model's file has.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.checks import wants, wants_path
from moe_lab.errors import LabError, LabTypeError, MissingExtra
from moe_lab.formats import QuantTensor
from moe_lab.system.files import replace_file

LONGEST_NAME = 63  # ggml keeps names in 64 bytes, the last one 0
_PLAIN = (torch.float32, torch.float16, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64)


def write_gguf_tensors(
    path: str | Path,
    architecture: str,
    tensors: Mapping[str, Tensor | QuantTensor],
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write tensors in the given order under their names, numpy shapes; what stood at `path` is replaced in one step.

    A QuantTensor keeps its raw blocks, which any format of ggml's may be; a Tensor its dtype. Metadata: bool, int (32
    bits where they suffice), float (fp32), str, and lists of one kind; `general.architecture` is written first.
    LabError for a format without a ggml type, a value or dtype that a GGUF cannot hold, an unwritable path;
    MissingExtra without `gguf`.
    """
    return replace_file(
        wants_path("the GGUF's path", path), lambda part: fill_gguf(part, architecture, tensors, metadata)
    )


def fill_gguf(
    file: Path,
    architecture: str,
    tensors: Mapping[str, Tensor | QuantTensor],
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write such a file in place, for a caller that puts it where it belongs. Errors as `write_gguf_tensors`, OSError
    from a disk that refuses.
    """
    try:
        import gguf
    except ImportError as error:
        raise MissingExtra("gguf", "hf", "writing a GGUF") from error

    _check_names(tensors)
    held = [(name, *_stored(name, value)) for name, value in tensors.items()]
    writer = gguf.GGUFWriter(str(file), architecture)
    try:
        for key, value in (metadata or {}).items():
            _add(writer, key, value)
        for name, array, ggml_type in held:
            raw = None if ggml_type is None else gguf.GGMLQuantizationType(ggml_type)
            writer.add_tensor(name, array, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _check_names(tensors: Mapping[str, Tensor | QuantTensor]) -> None:
    wants("tensors", tensors, Mapping, "a mapping from name to tensor")
    for name in tensors:
        wants("a tensor's name", name, str, "text")
        length = len(name.encode())
        if not 0 < length <= LONGEST_NAME:
            raise LabError(f"the tensor name {name[:80]!r} has {length} bytes; readers take 1..{LONGEST_NAME}.")


def _stored(name: str, value: Tensor | QuantTensor) -> tuple[Any, int | None]:
    """(numpy array, ggml type of raw bytes or None for an array of its own dtype)."""
    if isinstance(value, QuantTensor):
        ggml_type = value.codec.ggml_type
        if ggml_type is None:
            raise LabError(
                f"tensor {name!r} is {value.format}, which has no type in a GGUF. Dequantise it, and quantise again to "
                "one of ggml's formats."
            )
        return value.data.detach().cpu().contiguous().numpy(), ggml_type
    if not isinstance(value, Tensor):
        raise LabTypeError(f"tensor {name!r} is a {type(value).__name__}; wanted a torch tensor or a QuantTensor.")
    plain = value.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        # numpy has no such type: the bytes go in as they are.
        from moe_lab.formats import get_format

        return plain.view(torch.uint8).numpy(), get_format("bf16").ggml_type
    if plain.dtype not in _PLAIN:
        raise LabTypeError(f"tensor {name!r} is {plain.dtype}, which a GGUF cannot hold.")
    return plain.numpy(), None


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise LabError(f"metadata {key!r} is {value}, which no integer of a GGUF holds.")
        small = writer.add_uint32 if value >= 0 else writer.add_int32
        fits = -(1 << 31) <= value < 1 << 32
        (small if fits else writer.add_uint64 if value >= 0 else writer.add_int64)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list) and value and len({type(item) for item in value}) == 1:
        writer.add_array(key, value)
    else:
        raise LabTypeError(
            f"metadata {key!r} is {type(value).__name__}; wanted bool, int, float, str or a list of one of them."
        )
