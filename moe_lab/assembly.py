"""A MoE layer out of an open file: its tensors by role become router, experts, shared expert and what stands around.

Follows the layout alone; which tensors these are and that they fit the spec was settled when the file was opened.
"""

import torch

from moe_lab._types import Tensor
from moe_lab.checkpoint.gather import read_biases, read_dense, read_experts, read_shared
from moe_lab.checkpoint.layout import LayerLayout, MoELayout
from moe_lab.checkpoint.tensor_file import TensorFile
from moe_lab.families.row import NORMS
from moe_lab.formats.layouts import RAW, Laid, repacked
from moe_lab.layer import MoELayer
from moe_lab.spec import MoESpec
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.source import ExpertSource
from moe_lab.weights import Latent, ResidualNorms, RouterWeights, SharedWeights, on_device


class LayerReader:
    """Reads one layer's tensors onto `device`. Nothing of the file's other layers is touched."""

    def __init__(self, file: TensorFile, layout: MoELayout, number: int, device: torch.device) -> None:
        self._file, self._layout, self._number, self._device = file, layout, number, device
        self._layer: LayerLayout = layout.layers[number]

    def resident(self, kept: str = RAW) -> MoELayer:
        """The layer with all its experts in memory, in layout `kept` (`formats.layouts`). Beside what is kept, no more
        than one projection of the raw experts is held at a time."""
        experts = {role: self._experts(role, kept) for role in ("gate", "up", "down")}
        up, down, shared = experts["up"], experts["down"], self._shared()
        assert up is not None
        assert down is not None
        return MoELayer.from_tensors(
            self._layer.spec, router=self._router(), gate=experts["gate"], up=up, down=down, biases=self._biases(),
            shared=None if shared is None else shared.repacked(kept), latent=self._latent(), norms=self._norms(),
            number=self._number, model_hash=self._file.model_hash,
        )  # fmt: skip

    def _experts(self, role: str, kept: str) -> Laid | None:
        q = read_experts(self._file, self._layout.names, self._layer.tensors, role)
        return None if q is None else repacked(q.to(self._device), kept, f"layer {self._number}: {role}")

    def streamed(self, source: ExpertSource, cache: ExpertCache) -> MoELayer:
        """The layer with its experts read through `cache` as they are asked for, in the source's layout."""
        shared = self._shared()
        return MoELayer.streamed(
            self._layer.spec, router=self._router(), source=source, layer=self._number, cache=cache,
            biases=self._biases(), shared=None if shared is None else shared.repacked(source.layout),
            device=self._device, model_hash=self._file.model_hash,
        )  # fmt: skip

    def router(self) -> tuple[MoESpec, RouterWeights]:
        """The layer's spec and router alone, as next-layer prediction wants them."""
        router = self._router()
        router.check(self._layer.spec)
        return self._layer.spec, on_device(router, self._device)

    def _dense(self, role: str) -> Tensor | None:
        stored = self._layer.tensors.get(role)
        return None if stored is None else read_dense(self._file, stored).to(self._device)

    def _flat(self, role: str) -> Tensor | None:
        values = self._dense(role)
        return None if values is None else values.reshape(-1)

    def _router(self) -> RouterWeights:
        weight = self._dense("router")
        assert weight is not None
        return RouterWeights(
            weight=weight,
            bias=self._dense("router_bias"),
            correction_bias=self._flat("correction_bias"),
            hash_table=self._dense("hash_table"),
            per_expert_scale=self._dense("per_expert_scale"),
            input_scale=self._dense("input_scale"),
        )

    def _biases(self) -> dict[str, Tensor] | None:
        found = read_biases(self._file, self._layout.names, self._layer.tensors)
        return None if found is None else {part: bias.to(self._device) for part, bias in found.items()}

    def _shared(self) -> SharedWeights | None:
        parts = {
            role: read_shared(self._file, self._layer.tensors, f"shared_{role}") for role in ("gate", "up", "down")
        }
        moved = {role: None if q is None else q.to(self._device) for role, q in parts.items()}
        up, down = moved["up"], moved["down"]
        if up is None or down is None:
            return None
        return SharedWeights(moved["gate"], up, down, self._flat("shared_router"))

    def _latent(self) -> Latent | None:
        enter, leave = self._dense("latent_in"), self._dense("latent_out")
        return None if enter is None or leave is None else Latent(enter, leave)

    def _norms(self) -> ResidualNorms | None:
        if "norm.out" not in self._layer.tensors:
            return None
        return ResidualNorms(**{name: value for name in NORMS if (value := self._dense(f"norm.{name}")) is not None})
