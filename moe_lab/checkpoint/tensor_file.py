"""What every open tensor file offers, whatever container it came in: one base class over one or several parts."""

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from moe_lab._types import Tensor, UInt8
from moe_lab.checkpoint.plain_types import PLAIN
from moe_lab.checkpoint.rawfile import RawFile
from moe_lab.checkpoint.scale_names import Pairing
from moe_lab.checkpoint.scale_shapes import scale_table
from moe_lab.checkpoint.tensor_info import ScaledInfo, TensorInfo
from moe_lab.checks import wants
from moe_lab.errors import CheckpointError, LabError
from moe_lab.formats import FORMATS, QuantTensor

_SAMPLES, _SAMPLE_BYTES = 16, 4096


class TensorFile:
    """An open model: its tensors by name, checked against the bytes there are, read when they are asked for.

    `tensors` holds what is stored; `scaled` the weights whose scales are tensors of their own, by the weight's name.
    `metadata` is the container's (Python values), `config` the folder's config.json ({} without one). `parts` maps
    `TensorInfo.file` to the open file. Names are only names, never paths. Descriptors stay open until `close()`, the
    end of a `with`, or the object's end.
    """

    kind: ClassVar[str] = ""

    def __init__(
        self,
        path: Path,
        parts: Sequence[RawFile],
        head_bytes: Sequence[int],
        tensors: Mapping[str, TensorInfo],
        *,
        metadata: Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
        pairing: Pairing | None = None,
    ) -> None:
        self.path = path
        self.parts: Mapping[Path, RawFile] = {part.path: part for part in parts}
        self.size = sum(part.size for part in parts)
        self.tensors, self.metadata, self.config = tensors, metadata, config or {}
        self._pairing = pairing or Pairing({}, {}, {})
        self.scaled: Mapping[str, ScaledInfo] = self._pairing.scaled
        self._opened = tuple(parts)  # two names of an index may lead to one file
        self._head_bytes = {part.path: count for part, count in zip(parts, head_bytes, strict=True)}

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptors back. Tensors already read stay valid."""
        for part in self._opened:
            part.close()

    def check_unchanged(self) -> None:
        """CheckpointError "changed" when a part is no longer the file that was opened, or its path names another."""
        for part in self.parts.values():
            part.check_unchanged(path_too=True)

    def has(self, name: str) -> bool:
        """Whether `read(name)` knows the name: a stored tensor's, or a scaled weight's own."""
        return name in self.tensors or name in self.scaled

    def info(self, name: str) -> TensorInfo:
        """The stored tensor's row. CheckpointError "missing tensor" with the closest names when there is none."""
        wants("the tensor's name", name, str, "text, one of `tensors`")
        if name in self.tensors:
            return self.tensors[name]
        close = difflib.get_close_matches(name, self.tensors, n=3)
        hint = f"; close to it: {', '.join(map(repr, close))}" if close else ""
        raise CheckpointError(
            self.path, "missing tensor", f"no such tensor among {len(self.tensors)}{hint}.", tensor=name
        )

    def raw(self, name: str) -> UInt8[Tensor, " nbytes"]:
        """The stored tensor's bytes, a copy. CheckpointError when its size is unknown or the file changed."""
        info = self.info(name)
        if info.nbytes is None:
            self._no_decoder(info, "is unknown or withdrawn, so its size is unknown too")
        part = self.parts[info.file]
        part.check_unchanged(tensor=name)
        try:
            data = torch.empty(info.nbytes, dtype=torch.uint8)
        except RuntimeError as error:
            what = f"no memory for its {info.nbytes} bytes."
            raise CheckpointError(info.file, "memory", what, tensor=name, seen=info.nbytes) from error
        part.read_into(info.offset, data.numpy().data, tensor=name)
        return data

    def read(self, name: str) -> Tensor | QuantTensor:
        """The tensor in numpy order: its own dtype for plain types, QuantTensor for block formats and, with its scales
        collected, for a scaled weight (by its own name or that of its codes).
        """
        weight = self._pairing.find(name)
        if weight is not None:
            return self._scaled(weight)
        info = self.info(name)
        self.check_complete(name)
        if info.format is None:
            self._no_decoder(info, "is unknown or withdrawn")
        if info.format in PLAIN:
            return self.stored(name)
        if info.format not in FORMATS:
            self._no_decoder(info, "has no decoder here; .raw(name) gives its bytes")
        return QuantTensor.from_bytes(self.raw(name), info.format, info.shape)

    def check_complete(self, name: str) -> None:
        """CheckpointError "scale names" when the stored tensor is only a part of a weight and the rest is not known."""
        if name in self._pairing.refused:
            raise CheckpointError(self.info(name).file, "scale names", self._pairing.refused[name], tensor=name)

    def stored(self, name: str) -> Tensor:
        """A tensor of a plain type in its own dtype, alone: codes without their scales, scales without their codes."""
        info = self.info(name)
        if info.format not in PLAIN:
            self._no_decoder(info, "is no plain type")
        data = self.raw(name)
        if info.format == "bool" and data.numel() and int(data.max()) > 1:
            raise CheckpointError(
                info.file, "value", f"a BOOL is stored as {int(data.max())}; wanted 0 or 1.", tensor=info.name
            )
        return data.view(PLAIN[info.format]).reshape(info.shape)

    def _scaled(self, weight: ScaledInfo) -> QuantTensor:
        data, scales = self.stored(weight.data.name), self.stored(weight.scales.name)
        global_scale, biases = (
            None if t is None else self.stored(t.name) for t in (weight.global_scale, weight.biases)
        )
        table = scale_table(weight.format, weight.shape)
        if table is not None and scales.numel() == 1:  # one scale for the whole weight: as many equal ones
            scales = scales.reshape(()).expand(table)
        codes = data.view(torch.uint8) if data.dtype == torch.int8 else data
        try:
            return QuantTensor.from_parts(codes, scales, global_scale, weight.format, weight.shape, biases=biases)
        except CheckpointError:
            raise
        except LabError as error:
            raise CheckpointError(weight.data.file, "unsupported", str(error), tensor=weight.data.name) from error

    def _no_decoder(self, info: TensorInfo, why: str) -> NoReturn:
        readable = ", ".join((*PLAIN, *sorted(set(FORMATS) - set(PLAIN))))
        named = "" if info.format is None else f" ({info.format})"
        kind = f"dtype {info.dtype}" if info.ggml_type is None else f"tensor type {info.ggml_type}{named}"
        raise CheckpointError(
            info.file,
            "dtype" if info.ggml_type is None else "tensor type",
            f"{kind} {why}. Read here: {readable}.",
            tensor=info.name,
            seen=info.dtype if info.ggml_type is None else info.ggml_type,
            wanted="a type with a decoder",
        )

    @cached_property
    def model_hash(self) -> str:
        """Cheap identity of the model, hex sha256 over: for each part the header with its padding and the file size as
        8 little-endian bytes; then the first 4096 bytes of up to 16 tensors spread evenly over the parts. Tells two
        trainings of one shape apart, but is no checksum of the weights.
        """
        digest = hashlib.sha256()
        order = {file: number for number, file in enumerate(self.parts)}
        for part in self.parts.values():
            digest.update(_bytes(part, 0, min(self._head_bytes[part.path], part.size)))
            digest.update(part.size.to_bytes(8, "little"))
        placed = sorted((t for t in self.tensors.values() if t.nbytes), key=lambda t: (order[t.file], t.offset))
        picked = placed if len(placed) <= _SAMPLES else [placed[i * len(placed) // _SAMPLES] for i in range(_SAMPLES)]
        for tensor in picked:
            digest.update(_bytes(self.parts[tensor.file], tensor.offset, min(_SAMPLE_BYTES, tensor.nbytes or 0)))
        return digest.hexdigest()


def _bytes(part: RawFile, offset: int, count: int) -> bytes:
    data = bytearray(count)
    part.read_into(offset, memoryview(data))
    return bytes(data)
