"""What a tensor file says about one tensor, and about a weight whose scales are tensors of their own."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as it is stored. `shape` is in numpy order; `offset` counts from the start of `file`.

    `dtype` is the word in the file ("F8_E4M3", "Q2_K", "type 31"), `format` the lab's name for it. `format` and
    `nbytes` are None when a GGUF names a type number, `ggml_type`, that is unknown or withdrawn; safetensors have no
    such numbers. `file` is the part that holds the tensor when a model is split.
    """

    name: str
    format: str | None
    ggml_type: int | None
    shape: tuple[int, ...]
    nbytes: int | None
    offset: int
    dtype: str
    file: Path


@dataclass(frozen=True, slots=True)
class ScaledInfo:
    """A weight of several tensors: codes, scales and, in some formats, one global scale or biases.

    `name` is the weight's own ("..down_proj.weight"), also where the codes are stored under another
    ("..weight_packed"); `shape` is the shape of the values, [.., N, Kd]. The scales' shapes have been checked.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    data: TensorInfo
    scales: TensorInfo
    global_scale: TensorInfo | None = None
    biases: TensorInfo | None = None

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        """The stored tensors it is made of."""
        return tuple(t for t in (self.data, self.scales, self.global_scale, self.biases) if t is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(t.nbytes or 0 for t in self.parts)
