"""A GGUF file: checked when it is opened, tensors read when they are asked for."""

import difflib
import hashlib
import os
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch

from moe_lab._types import Tensor, UInt8
from moe_lab.checkpoint.gguf_header import TensorInfo, read_header
from moe_lab.checkpoint.rawfile import RawFile, ReadCall
from moe_lab.errors import CheckpointError
from moe_lab.formats import FORMATS, QuantTensor

# Types that torch holds as they are.
_PLAIN: dict[str, torch.dtype] = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64,
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip
_SAMPLES, _SAMPLE_BYTES = 16, 4096


class GgufFile:
    """An open GGUF. `tensors` maps names to TensorInfo; names are only names, never paths.

    `metadata` holds Python values (int, float, bool, str, lists). Opening costs the header alone. A descriptor stays
    open until `close()`, the end of a `with`, or the object's end.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_call: ReadCall = os.preadv) -> None:
        self.file = RawFile(path, read_call)
        try:
            self.header = read_header(self.file)
            _check_parts(self.file, self.header.metadata)
        except BaseException:
            self.file.close()
            raise
        self.path, self.size = self.file.path, self.file.size
        self.metadata: Mapping[str, Any] = self.header.metadata
        self.tensors: Mapping[str, TensorInfo] = self.header.tensors

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back. Tensors already read stay valid."""
        self.file.close()

    def info(self, name: str) -> TensorInfo:
        """The tensor's row of the table. CheckpointError "missing tensor" with the closest names when there is none."""
        if name in self.tensors:
            return self.tensors[name]
        close = difflib.get_close_matches(name, self.tensors, n=3)
        hint = f"; close to it: {', '.join(map(repr, close))}" if close else ""
        raise CheckpointError(
            self.path, "missing tensor", f"no such tensor among {len(self.tensors)}{hint}.", tensor=name
        )

    def raw(self, name: str) -> UInt8[Tensor, " nbytes"]:
        """The tensor's bytes, a copy. CheckpointError when its type has no known size or the file changed."""
        info = self.info(name)
        if info.nbytes is None:
            self._no_decoder(info, "is unknown or withdrawn, so its size is unknown too")
        self.file.check_unchanged(tensor=name)
        data = np.empty(info.nbytes, np.uint8)
        self.file.read_into(info.offset, data.data, tensor=name)
        return torch.from_numpy(data)

    def read(self, name: str) -> Tensor | QuantTensor:
        """The tensor in numpy order: its own dtype for plain types, QuantTensor for block formats."""
        info = self.info(name)
        if info.format is None:
            self._no_decoder(info, "is unknown or withdrawn")
        if info.format in _PLAIN:
            return self.raw(name).view(_PLAIN[info.format]).reshape(info.shape)
        if info.format not in FORMATS:
            self._no_decoder(info, f"({info.format}) has no decoder here; .raw(name) gives its bytes")
        return QuantTensor.from_bytes(self.raw(name), info.format, info.shape)

    def _no_decoder(self, info: TensorInfo, why: str) -> NoReturn:
        readable = ", ".join((*_PLAIN, *sorted(set(FORMATS) - set(_PLAIN))))
        raise CheckpointError(
            self.path,
            "tensor type",
            f"tensor type {info.ggml_type} {why}. Read here: {readable}.",
            tensor=info.name,
            seen=info.ggml_type,
            wanted="a type with a decoder",
        )

    @cached_property
    def model_hash(self) -> str:
        """Cheap identity of the model, hex sha256 over: the header with its padding; the file size as 8 little-endian
        bytes; the first 4096 bytes of up to 16 tensors spread evenly over the file. Tells two trainings of one shape
        apart, but is no checksum of the weights.
        """
        digest = hashlib.sha256(self._bytes(0, min(self.header.data_start, self.size)))
        digest.update(self.size.to_bytes(8, "little"))
        placed = sorted((t for t in self.tensors.values() if t.nbytes), key=lambda t: t.offset)
        picked = placed if len(placed) <= _SAMPLES else [placed[i * len(placed) // _SAMPLES] for i in range(_SAMPLES)]
        for tensor in picked:
            digest.update(self._bytes(tensor.offset, min(_SAMPLE_BYTES, tensor.nbytes or 0)))
        return digest.hexdigest()

    def _bytes(self, offset: int, count: int) -> bytes:
        data = bytearray(count)
        self.file.read_into(offset, memoryview(data))
        return bytes(data)


def _check_parts(file: RawFile, metadata: Mapping[str, Any]) -> None:
    """A model split over several files is refused as a whole, naming the parts."""
    count, number = metadata.get("split.count", 1), metadata.get("split.no", 0)
    if not isinstance(count, int) or not isinstance(number, int) or count <= 1:
        return
    named = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", file.path.name)
    sisters = {
        n: f"{named[1]}{n:05d}{named[2]}" if named else f"part {n}"
        for n in range(1, min(count, 999) + 1)
        if n != number + 1
    }
    missing = [text for text in sisters.values() if not named or not (file.path.parent / text).is_file()]
    if missing:
        listed = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise CheckpointError(
            file.path,
            "missing part",
            f"is part {number + 1} of {count}; missing: {listed}.",
            seen=number + 1,
            wanted=f"{count} parts",
        )
    raise CheckpointError(
        file.path,
        "unsupported",
        f"is part {number + 1} of {count}; models split over several files are not read yet. Merge the parts.",
        seen=f"{count} parts",
        wanted="one file",
    )
