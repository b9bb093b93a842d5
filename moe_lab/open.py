"""`lab.open`: a model file as a Checkpoint, whose layers are built on request.

The only place that joins files, families, streaming and layers. Reads GGUF now.
"""

import os
import reprlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from moe_lab._types import Tensor, UInt8
from moe_lab.checkpoint.gguf import GgufFile
from moe_lab.checkpoint.gguf_header import TensorInfo
from moe_lab.checkpoint.layout import MoELayout, read_layout
from moe_lab.checkpoint.names import ExpertSlice
from moe_lab.devices import resolve_device
from moe_lab.errors import CheckpointError, LabError
from moe_lab.families import FAMILIES, Family, family_of_arch, get_family
from moe_lab.formats import FORMATS, QuantTensor
from moe_lab.layer import MoELayer
from moe_lab.spec import MoESpec
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.source import ExpertSource
from moe_lab.weights import SharedWeights, as_quant


def open(path: str | os.PathLike[str], *, family: str | Family | None = None) -> "Checkpoint":
    """Open a model file (GGUF) and check it whole. `family` overrides what the file's architecture says.

    CheckpointError for a file that is missing, broken, hostile or of a kind not read yet. A file without MoE layers, or
    of an architecture without a family, opens with `.spec` None: its tensors can be read all the same.
    """
    _refuse_other_kinds(Path(path))
    file = GgufFile(path)
    try:
        arch = file.metadata.get("general.architecture")
        chosen = family_of_arch(arch) if family is None else get_family(family)
        return Checkpoint(file, read_layout(file, chosen) if chosen is not None else None)
    except BaseException:
        file.close()
        raise


def _refuse_other_kinds(path: Path) -> None:
    if path.is_dir() or path.suffix == ".safetensors":
        kind = "a folder" if path.is_dir() else "a safetensors file"
        raise CheckpointError(
            path, "unsupported", f"is {kind}; only single GGUF files are read so far.", seen=kind, wanted="a GGUF file"
        )


class Checkpoint:
    """An open model file. `spec` (MoESpec) and `moe_layers` are None and empty for a file without a known MoE.

    `tensors[name]` has .format .shape (numpy order) .nbytes .offset. Use as a context manager, or `close()`, to give
    the file back; layers already built stay valid unless they stream.
    """

    def __init__(self, file: GgufFile, layout: MoELayout | None) -> None:
        self._file, self._layout = file, layout
        self.path = file.path
        self.tensors: Mapping[str, TensorInfo] = file.tensors
        self.metadata: Mapping[str, Any] = file.metadata
        self.spec: MoESpec | None = layout.spec if layout else None
        self.moe_layers: list[int] = list(layout.layers) if layout else []

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = f"{len(self.moe_layers)} {self.spec.family} layers" if self.spec else "no MoE layers known"
        return f"Checkpoint({str(self.path)!r}, {what}, {len(self.tensors)} tensors, {self.size} bytes)"

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.size

    @property
    def model_hash(self) -> str:
        """The model's identity in traces and reports: see GgufFile.model_hash."""
        return self._file.model_hash

    def close(self) -> None:
        """Give the file descriptor back."""
        self._file.close()

    def read(self, name: str) -> Tensor | QuantTensor:
        """A tensor on the CPU: its own dtype for plain types, QuantTensor for block formats."""
        return self._file.read(name)

    def raw(self, name: str) -> UInt8[Tensor, " nbytes"]:
        """A tensor's bytes, uint8 [nbytes], a copy."""
        return self._file.raw(name)

    def layer(self, i: int, device: str | torch.device = "cpu", cache: ExpertCache | None = None) -> MoELayer:
        """MoE layer `i` on `device`: all its experts resident, or streamed from the file through `cache`.

        LabError when the file has no such MoE layer. One cache may serve all layers of a checkpoint.
        """
        tensors, spec, device = self.layer_tensors(i), self._known_layout().spec, resolve_device(device)
        router, shared = self._dense(tensors["router"], device), self._shared(tensors, device)
        about = {"router": router, "shared": shared, "model_hash": self.model_hash}
        if cache is not None:
            return MoELayer.streamed(spec, source=self.expert_source, layer=i, cache=cache, device=device, **about)
        experts = {role: self._weight(tensors[role], device) for role in ("gate", "up", "down")}
        return MoELayer.from_tensors(spec, number=i, **experts, **about)

    def expert_slices(self, layer: int) -> list[ExpertSlice]:
        """Where the layer's gate, up and down experts stand in the file, in that order."""
        tensors = self.layer_tensors(layer)
        return [self._slice(tensors[role]) for role in ("gate", "up", "down")]

    def layer_tensors(self, layer: int) -> Mapping[str, TensorInfo]:
        """The layer's tensors by role: router, gate, up, down and, with a shared expert, shared_gate and so on."""
        layers = self._known_layout().layers
        if layer not in layers:
            raise LabError(f"{self.path} has no MoE layer {layer!r}; it has {', '.join(map(str, layers))}.")
        return layers[layer]

    @cached_property
    def expert_source(self) -> ExpertSource:
        """The experts of all layers as a cache reads them; one object a checkpoint, so that one cache can serve it."""
        self._file.file.check_unchanged(path_too=True)
        return ExpertSource.from_checkpoint(self, model_hash=self.model_hash, identity=self._file.file.identity)

    def _known_layout(self) -> MoELayout:
        if self._layout is None:
            arch = reprlib.repr(self.metadata.get("general.architecture"))
            raise LabError(
                f"{self.path} (architecture {arch}) has no MoE layers that a known family describes; known families: "
                f"{', '.join(FAMILIES)}. Pass open(path, family=...) a Family of your own for another one."
            )
        return self._layout

    def _weight(self, info: TensorInfo, device: str | torch.device) -> QuantTensor:
        self._check_weight(info)
        return as_quant(self.read(info.name), info.name, info.shape).to(device)

    def _dense(self, info: TensorInfo, device: str | torch.device) -> Tensor:
        stored = self.read(info.name)
        return (stored.dequantize() if isinstance(stored, QuantTensor) else stored).to(device)

    def _check_weight(self, info: TensorInfo) -> None:
        if info.format not in FORMATS:
            known = ", ".join(FORMATS)
            raise CheckpointError(
                self.path,
                "tensor type",
                f"no layer computes with tensor type {info.ggml_type} ({info.format or 'unknown'}); wanted: {known}.",
                tensor=info.name,
                seen=info.ggml_type,
                wanted=known,
            )

    def _shared(self, tensors: Mapping[str, TensorInfo], device: str | torch.device) -> SharedWeights | None:
        if "shared_gate" not in tensors:
            return None
        gate, up, down = (self._weight(tensors[role], device) for role in ("shared_gate", "shared_up", "shared_down"))
        gated = "shared_router" in tensors
        return SharedWeights(
            gate, up, down, self._dense(tensors["shared_router"], device).reshape(-1) if gated else None
        )

    def _slice(self, info: TensorInfo) -> ExpertSlice:
        self._check_weight(info)
        experts, rows, columns = info.shape
        assert info.format is not None
        assert info.nbytes is not None
        return ExpertSlice(info.name, info.format, info.offset, info.nbytes // experts, (experts, rows, columns))
