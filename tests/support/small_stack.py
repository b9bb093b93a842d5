"""A few MoE layers small enough for hundreds of calls a test: q8_0 experts in a raw file, and their resident twins."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from moe_lab.formats import QuantTensor, quantize
from moe_lab.layer import MoELayer, SharedWeights
from moe_lab.spec import MoESpec, RouterSpec, SharedSpec
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.prediction import Successor
from moe_lab.stream.source import ExpertSource

D, F, E, K = 64, 32, 12, 3
PARTS = (("gate", (F, D)), ("up", (F, D)), ("down", (D, F)))


class SmallStack:
    """`layers` layers of one spec (`router` changes its settings), written to `folder`; `source` reads the experts."""

    def __init__(self, folder: Path, layers: int = 3, **router) -> None:
        self.spec = MoESpec(replace(RouterSpec(E, K, normalize=True), **router), D, F, shared=SharedSpec(F))
        draw = torch.Generator().manual_seed(17)

        def made(*shape: int) -> QuantTensor:
            return quantize(torch.randn(*shape, generator=draw) * shape[-1] ** -0.5, "q8_0")

        self.routers, self.shared, self.resident, slices = [], [], [], {}
        path = folder / "experts.bin"
        with path.open("wb") as file:
            for number in range(layers):
                parts = {name: made(E, *shape) for name, shape in PARTS}
                slices[number] = []
                for name, shape in PARTS:
                    raw = parts[name].data.numpy()
                    slices[number].append((f"blk.{number}.{name}", "q8_0", file.tell(), raw.nbytes // E, (E, *shape)))
                    file.write(raw.tobytes())
                self.routers.append(torch.randn(self.spec.router.width, D, generator=draw) * D**-0.5 * 2)
                self.shared.append(SharedWeights(*(made(*shape) for _, shape in PARTS)))
                about = {"router": self.routers[-1], "shared": self.shared[-1], "number": number}
                self.resident.append(MoELayer.from_tensors(self.spec, **parts, **about))
        self.source = ExpertSource(path, slices)

    def streamed(self, cache: ExpertCache) -> list[MoELayer]:
        """The layers over a cache, each knowing the next."""
        made = [
            MoELayer.streamed(self.spec, router=router, source=self.source, layer=i, cache=cache, shared=shared)
            for i, (router, shared) in enumerate(zip(self.routers, self.shared, strict=True))
        ]
        for layer, after in pairwise(made):
            layer.successor = Successor.of(after)
        made[-1].successor = Successor.none()
        return made
