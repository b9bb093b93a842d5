"""Where one of a layer's expert stacks stands in its files."""

from dataclasses import dataclass
from pathlib import Path

import torch

from moe_lab.checkpoint.names import EXPERT
from moe_lab.formats import WeightFormat


@dataclass(frozen=True, slots=True)
class Beside:
    """What an expert of a scaled format has beside its codes: `field` of QuantTensor, [rows, columns] of `dtype`, at
    `places[e]`. `name` as ExpertSlice's.
    """

    field: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, int]
    places: tuple[tuple[Path, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one expert's."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """One of a layer's expert stacks in its files: expert e is `expert_nbytes` at `places[e]`, (file, byte offset).

    `shape` is [E, N, Kd]: [E, F, D] for gate and up, [E, D, F] for down. `name` holds {expert} where every expert has a
    tensor of its own.
    """

    name: str
    format: str | WeightFormat
    expert_nbytes: int
    shape: tuple[int, int, int]
    places: tuple[tuple[Path, int], ...]
    beside: tuple[Beside, ...] = ()

    @property
    def offset(self) -> int:
        """Where expert 0 begins in its file."""
        return self.places[0][1]

    def tensor(self, expert: int) -> str:
        """The name of the tensor that holds this expert."""
        return self.name.replace(EXPERT, str(expert))
