"""`lab.open`: a model file as a Checkpoint, whose layers are built on request.

The only place that joins files, families, streaming and layers. GGUF (one file or several), safetensors (a file, an
index, a folder as Hugging Face lays it out).
"""

import copy
import os
import reprlib
from collections.abc import Mapping
from functools import cached_property
from numbers import Integral
from typing import Any, NoReturn

import torch

from moe_lab._types import Tensor, UInt8
from moe_lab.arms import best_layout
from moe_lab.assembly import LayerReader
from moe_lab.card import byte_size, card, spans
from moe_lab.checkpoint import TensorFile, TensorInfo, open_tensor_file
from moe_lab.checkpoint.expert_slice import ExpertSlice
from moe_lab.checkpoint.layout import LayerLayout, MoELayout, family_of_file, read_layout
from moe_lab.checkpoint.names import Stored
from moe_lab.checkpoint.rawfile import ReadCall
from moe_lab.checkpoint.slices import ROUTED, expert_slices
from moe_lab.checks import wants, wants_path
from moe_lab.errors import CheckpointError, LabError
from moe_lab.families import FAMILIES, Family, get_family
from moe_lab.formats import QuantTensor
from moe_lab.formats.layouts import RAW, check_layout
from moe_lab.layer import MoELayer
from moe_lab.spec import MoESpec
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.packed import PackedSource
from moe_lab.stream.prediction import Successor
from moe_lab.stream.source import ExpertSource
from moe_lab.system.devices import resolve_device

AUTO = "auto"


def open(
    path: str | os.PathLike[str],
    *,
    family: str | Family | None = None,
    packed: str | os.PathLike[str] | None = None,
    layout: str = RAW,
) -> "Checkpoint":
    """Open a model and check it whole: a GGUF (any part of a split one), a safetensors file, its index, or the folder
    of a Hugging Face model. `family` overrides what the file says of itself. `packed`: a file that `moe-lab pack` made
    of this model, from which layers with a `cache` stream their experts. `layout`: how its layers keep experts, in
    memory or in a cache's slots: "raw" as the file has them, "planar" or "tiles" repacked as they come (formats that
    have none are refused when the layer is made), "auto" for each resident layer as this device's table of measured
    arms has it quickest at one token, raw where there is none and in caches.

    CheckpointError for a file that is missing, broken, hostile or of a kind not read, that lacks a MoE layer which its
    settings promise, or has none that the `family` given describes. A file without MoE layers, or of an architecture
    without a family, opens with `.spec` None: its tensors can be read all the same.
    """
    check_layout(layout, AUTO)
    file = open_tensor_file(wants_path("the model's path", path))
    try:
        chosen = family_of_file(file) if family is None else get_family(family)
        known = read_layout(file, chosen) if chosen is not None else None
        if family is not None and known is None:
            _refuse_family(file, get_family(family))
        return Checkpoint(file, known, None if packed is None else PackedSource(packed), layout)
    except BaseException:
        file.close()
        raise


def _refuse_family(file: TensorFile, family: Family) -> NoReturn:
    row = family.gguf if file.kind == "gguf" else family.hf
    wanted = " or ".join(dict.fromkeys(names.down for names in row.names)) if row else ""
    own = family_of_file(file)
    hint = f" The file says of itself that it is {own.name}." if own is not None and own.name != family.name else ""
    what = f"has no MoE layer of a {family.name} model: no tensor is called {wanted}.{hint}"
    raise CheckpointError(file.path, "missing tensor", what, wanted=wanted)


class Checkpoint:
    """An open model file. `spec` (MoESpec, of the first MoE layer) and `moe_layers` are None and empty for a file
    without a known MoE.

    `tensors[name]` has .format .shape (numpy order) .nbytes .offset .file. Use as a context manager, or `close()`, to
    give the files back; layers already built stay valid unless they stream.
    """

    def __init__(
        self, file: TensorFile, layout: MoELayout | None, packed: PackedSource | None = None, kept: str = RAW
    ) -> None:
        self._file, self._layout, self._packed, self._kept = file, layout, packed, kept
        if packed is not None:
            packed.check_model(file.model_hash)
        self.path = file.path
        self.tensors: Mapping[str, TensorInfo] = file.tensors
        self.metadata: Mapping[str, Any] = file.metadata
        self.config: Mapping[str, Any] = file.config
        self.spec: MoESpec | None = layout.spec if layout else None
        self.moe_layers: list[int] = list(layout.layers) if layout else []

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = f"{len(self.moe_layers)} {self.spec.family} layers" if self.spec else "no MoE layers known"
        return f"Checkpoint({str(self.path)!r}, {what}, {len(self.tensors)} tensors, {self.size} bytes)"

    def _repr_html_(self) -> str:
        s = self.spec
        sizes = f"D={s.d_model} F={s.d_expert} E={s.num_experts} K={s.top_k}" if s else None
        first = self._layout.layers[self.moe_layers[0]].tensors if self._layout and self.moe_layers else {}
        facts = {
            "file": f"{self.path.name}, {byte_size(self.size)}, {len(self.tensors)} tensors",
            "architecture": self.architecture,
            "family": s.family if s else "none known",
            "MoE layers": f"{len(self.moe_layers)}: {spans(self.moe_layers)}" if s else None,
            "first of them": sizes,
            "formats": ", ".join(f"{role} {'/'.join(t.formats)}" for role, t in first.items() if role in ROUTED),
        }
        return card("Checkpoint", facts)

    @property
    def size(self) -> int:
        """Bytes of the file, of all parts together where there are several."""
        return self._file.size

    @property
    def architecture(self) -> str | None:
        """What the file calls its architecture: `general.architecture` of a GGUF, `model_type` of a config."""
        key = "general.architecture" if self._file.kind == "gguf" else "model_type"
        said = (self.metadata if self._file.kind == "gguf" else self.config).get(key)
        return said if isinstance(said, str) else None

    @property
    def model_hash(self) -> str:
        """The model's identity in traces and reports: see TensorFile.model_hash."""
        return self._file.model_hash

    def close(self) -> None:
        """Give the file descriptors back."""
        self._file.close()

    def read(self, name: str) -> Tensor | QuantTensor:
        """A tensor on the CPU: its own dtype for plain types, QuantTensor for block formats and for weights whose
        scales are tensors of their own.
        """
        return self._file.read(name)

    def raw(self, name: str) -> UInt8[Tensor, " nbytes"]:
        """A tensor's bytes, uint8 [nbytes], a copy."""
        return self._file.raw(name)

    def layer(self, i: int, device: str | torch.device = "cpu", cache: ExpertCache | None = None) -> MoELayer:
        """MoE layer `i` on `device`: all its experts resident, or streamed from the file through `cache`.

        Reads this layer's tensors alone. LabError when the file has no such MoE layer, CheckpointError "unsupported"
        for a `cache` over experts that are no runs of bytes. One cache may serve all layers of a checkpoint.
        """
        self._layer(i)
        if cache is not None:
            wants("cache", cache, ExpertCache, "a lab.ExpertCache, such as lab.ExpertCache(slots=8)")
        where = resolve_device(device)
        reader = LayerReader(self._file, self._known_layout(), i, where)
        if cache is None:
            return reader.resident(self._kept_by(i, where))
        layer = reader.streamed(self.expert_source, cache)
        layer.successor = self._successor(i, where)
        return layer

    def _kept_by(self, i: int, device: torch.device) -> str:
        """The layout of a resident layer's experts."""
        if self._kept != AUTO:
            return self._kept
        tensors = self.layer_tensors(i)
        stored = (tensors.get(role) or tensors.get("gate_up") for role in ROUTED)
        formats = tuple(f for s in stored if s is not None for f in s.formats)
        return best_layout("cuda" if device.type == "cuda" else "torch", formats, self.layer_spec(i))

    def _successor(self, i: int, device: torch.device) -> Successor:
        """The MoE layer after `i`, whose router is read when a prediction first asks for it."""
        later = self.moe_layers[self.moe_layers.index(i) + 1 :]
        if not later:
            return Successor.none()
        return Successor(later[0], LayerReader(self._file, self._known_layout(), later[0], device).router)

    def layer_spec(self, layer: int) -> MoESpec:
        """One layer's spec: layers differ where a setting, such as a clamp or hash routing, is a layer's own."""
        return self._layer(layer).spec

    def layer_tensors(self, layer: int) -> Mapping[str, Stored]:
        """The layer's tensors by role: router, gate, up, down and whatever else it has; fused ones as one."""
        return self._layer(layer).tensors

    def expert_slices(self, layer: int) -> list[ExpertSlice]:
        """Where the layer's gate, up and down experts stand, in that order. CheckpointError where they are no runs."""
        return expert_slices(self._file, self._known_layout().names, self.layer_tensors(layer))

    @cached_property
    def expert_source(self) -> ExpertSource:
        """The experts of all layers as a cache reads them; one object a checkpoint, so that one cache can serve it."""
        self._file.check_unchanged()
        identities = {path: part.identity for path, part in self._file.parts.items()}
        in_place = ExpertSource.from_checkpoint(self, model_hash=self.model_hash, identities=identities)
        kept = RAW if self._kept == AUTO else self._kept
        if self._packed is None:
            return in_place.kept_as(kept)
        self._packed.check_parts(in_place)
        return self._packed.kept_as(kept)

    def reading_through(self, call: ReadCall) -> "Checkpoint":
        """The same model, whose caches read with `call` in the place of `os.preadv`: slow disks, disks with faults."""
        other = copy.copy(self)
        other.__dict__["expert_source"] = self.expert_source.reading_through(call)
        return other

    def _layer(self, layer: int) -> LayerLayout:
        layers = self._known_layout().layers
        if isinstance(layer, bool) or not isinstance(layer, Integral) or layer not in layers:
            raise LabError(f"{self.path} has no MoE layer {layer!r}; it has {', '.join(map(str, layers))}.")
        return layers[layer]

    def _known_layout(self) -> MoELayout:
        if self._layout is None:
            arch = reprlib.repr(self.architecture)
            own = family_of_file(self._file)
            if own is not None:
                raise LabError(f"{self.path} (architecture {arch}, family {own.name}) is dense: it has no MoE layer.")
            raise LabError(
                f"{self.path} (architecture {arch}) has no MoE layers that a known family describes; known families: "
                f"{', '.join(FAMILIES)}. Pass open(path, family=...) a Family of your own for another one."
            )
        return self._layout
