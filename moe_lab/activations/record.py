"""What a real model feeds its MoE layers: x [L, T, D] for the same T tokens, and where it comes from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moe_lab._types import Tensor
from moe_lab.checks import wants, wants_path, wants_whole, wants_wholes
from moe_lab.errors import LabError, LabTypeError

if TYPE_CHECKING:
    from moe_lab.families import Family

FP16_MAX = 65504.0


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """Inputs of L MoE layers for the same T tokens. x float16 or float32 [L, T, D]; `layers` names the L layers.

    token_ids int32 [T], domains str [T], `source` (the model's name) and `model_hash` ("" where unknown). float64 is
    kept as float32. LabTypeError for other kinds, LabError for values that are not finite (or not in float32).
    """

    x: np.ndarray
    layers: tuple[int, ...]
    token_ids: np.ndarray | None = None
    domains: np.ndarray | None = None
    source: str = ""
    model_hash: str = ""

    def __post_init__(self) -> None:
        wants("Activations.x", self.x, np.ndarray, "a numpy array [L, T, D]")
        if self.x.dtype.kind != "f" or self.x.ndim != 3:
            raise LabTypeError(f"Activations.x is {self.x.dtype} {self.x.shape}; wanted floating point [L, T, D].")
        layers = tuple(wants_wholes("Activations.layers", self.layers))
        if len(layers) != len(self.x) or len(set(layers)) < len(layers):
            raise LabError(f"Activations.layers is {layers}; wanted {len(self.x)} different numbers, one a layer of x.")
        with np.errstate(over="ignore"):
            x = self.x if self.x.dtype in (np.float16, np.float32) else self.x.astype(np.float32)
        for number, rows in zip(layers, x, strict=True):
            if not (finite := np.isfinite(rows)).all():
                token = int(np.flatnonzero(~finite.all(axis=1))[0])
                raise LabError(f"Activations.x of layer {number} holds values that are not finite (token {token}).")
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "layers", layers)

    @classmethod
    def capture(
        cls,
        model: torch.nn.Module,
        texts: Any,
        *,
        tokenizer: Any = None,
        max_tokens: int | None = None,
        layers: Sequence[int] | None = None,
        domains: str | Sequence[str] | None = None,
        dtype: str | None = None,
        family: "str | Family | None" = None,
    ) -> "Activations":
        """Run `model` on `texts` and keep what its MoE layers are fed: x as our MoELayer takes it.

        `model`: a transformers model, or any module called with token ids [1, T], whose blocks a family's row reads
        (`family`: a row of your own beside them). `texts`: strings (then `tokenizer`) or token ids, run one at a time,
        unpadded; rows stand in that order, each text's tokens in theirs. `max_tokens`: rows in all (None takes every
        token); the text that reaches it is cut. `layers`: these alone. `domains`: a name for all texts or one each.
        Model modes and hooks are put back, gradients are off.

        `dtype`: "float16", "float32", or None for float16 unless a value lies beyond its +-65,504, then float32.
        Memory: L * T * D * 2 (or 4) bytes. LabError for values that are not finite, or beyond an explicit float16.
        """
        from moe_lab.activations.capture import capture

        return capture(
            model, texts, tokenizer=tokenizer, max_tokens=max_tokens, layers=layers, domains=domains, dtype=dtype,
            family=family,
        )  # fmt: skip

    @classmethod
    def load(cls, file: str | Path) -> "Activations":
        """Read a recording; the suffix says how, anything but .safetensors is read as npz.

        npz: `x` [L, T, D] and optional `layers` [L], `token_ids` [T], `domain` [T]. safetensors: `x` likewise, or a
        tensor [T, D] a layer with the layer's number in its name, and optional `layers`, `token_ids`; metadata `source`
        and `model_hash`. LabError naming what the file has when it is none.
        """
        from moe_lab.activations.files import read

        return read(wants_path("the recording's path", file))

    def save(self, file: str | Path) -> Path:
        """Write an npz that `load` reads; returns its path. LabError for another suffix or a disk that refuses."""
        from moe_lab.activations.files import write

        return write(self, wants_path("the recording's path", file))

    @property
    def synthetic(self) -> bool:
        """False: a recording is never noise (`Inputs` may be)."""
        return False

    @property
    def tokens(self) -> int:
        """T."""
        return self.x.shape[1]

    @property
    def d_model(self) -> int:
        """D."""
        return self.x.shape[2]

    def layer(self, number: int, tokens: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """x [T, D] of one layer, its first `tokens` rows. LabError for an unknown layer or too many rows."""
        if wants_whole("layer", number) not in self.layers:
            raise LabError(f"no activations of layer {number}; recorded: {', '.join(map(str, self.layers))}.")
        if tokens is not None and not 0 <= wants_whole("tokens", tokens) <= self.tokens:
            raise LabError(f"{tokens} tokens asked, but {self.tokens} were recorded.")
        return torch.from_numpy(self.x[self.layers.index(number), :tokens].astype(np.float32)).to(dtype)
