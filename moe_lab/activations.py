"""Recorded inputs of MoE layers: what a real model feeds them.

A file (npz) holds x fp16 [L, T, D] with token_ids int32 [T] and domain str [T] where known. Claims about routing need
such input; random x has no tokens in it, so `Inputs` says which it hands out.
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError

SEED = 0


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """Inputs of L MoE layers for the same T tokens. x float16 [L, T, D]; `layers` names the L layers."""

    x: np.ndarray
    layers: tuple[int, ...]
    token_ids: np.ndarray | None = None
    domains: np.ndarray | None = None

    @classmethod
    def load(cls, file: str | Path) -> "Activations":
        """Read an npz with `x` [L, T, D] and optional `layers` [L], `token_ids` [T], `domain` [T]. LabError if it is
        none.
        """
        arrays = read_npz(file)
        x = arrays.get("x")
        if x is None or x.ndim != 3 or x.dtype.kind != "f":
            seen = "no x" if x is None else f"{x.dtype} {x.shape}"
            raise LabError(
                f"{file} must hold x, floating point [L, T, D]; it has {seen} (arrays: {', '.join(arrays)})."
            )
        numbers = arrays["layers"] if "layers" in arrays else np.arange(x.shape[0])
        if numbers.dtype.kind not in "iu" or numbers.shape != (x.shape[0],) or len(np.unique(numbers)) != len(numbers):
            raise LabError(
                f"{file}: layers must be {x.shape[0]} different whole numbers, one for each layer of x; "
                f"it is {numbers.dtype} of shape {numbers.shape}."
            )
        layers = tuple(int(n) for n in numbers)
        for name in ("token_ids", "domain"):
            if name in arrays and arrays[name].shape != (x.shape[1],):
                raise LabError(f"{file}: {name} has shape {arrays[name].shape}; wanted [T] = [{x.shape[1]}].")
        return cls(x, layers, arrays.get("token_ids"), arrays.get("domain"))

    @property
    def tokens(self) -> int:
        """T."""
        return self.x.shape[1]

    def layer(self, number: int, tokens: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """x [T, D] of one layer, its first `tokens` rows. LabError for an unknown layer or too many rows."""
        if number not in self.layers:
            raise LabError(f"no activations of layer {number}; recorded: {', '.join(map(str, self.layers))}.")
        if tokens is not None and not 0 <= tokens <= self.tokens:
            raise LabError(f"{tokens} tokens asked, but {self.tokens} were recorded.")
        return torch.from_numpy(self.x[self.layers.index(number), :tokens].astype(np.float32)).to(dtype)


def read_npz(file: str | Path) -> dict[str, np.ndarray]:
    """The arrays of an npz, pickles refused. LabError naming the file for anything that is not one."""
    if not Path(file).is_file():
        what = "is not a regular file" if Path(file).exists() else "does not exist"
        raise LabError(f"{file} {what}; wanted an npz of activations.")
    try:
        with zipfile.ZipFile(file):
            pass  # np.load also takes bare arrays and pickles
        with np.load(file, allow_pickle=False) as data:
            return {name: data[name] for name in data.files}
    except (OSError, ValueError, TypeError, RuntimeError, MemoryError, zipfile.BadZipFile, EOFError) as e:
        raise LabError(f"{file} is not a readable npz of activations: {' '.join(str(e).split())}") from e


class Inputs:
    """Rows for the MoE layers of one model: recorded where a recording fits, else seeded noise.

    `recorded`: an npz, or None to take `activations.npz` beside the model when there is one. `about` says in a sentence
    what the rows are; `synthetic` is True for noise, about which no claim on routing may be made.
    """

    def __init__(self, model: str | Path, d_model: int, tokens: int, recorded: str | Path | None = None) -> None:
        beside = Path(model).parent / "activations.npz"
        path = recorded if recorded is not None else beside if beside.is_file() else None
        self.recorded = Activations.load(path) if path is not None else None
        if self.recorded is not None and self.recorded.x.shape[2] != d_model:
            raise LabError(f"{path} holds rows of D={self.recorded.x.shape[2]}, {model} wants D={d_model}.")
        self.tokens, self.d_model, self.synthetic = tokens, d_model, self.recorded is None
        self.about = (
            f"{tokens} rows recorded in {Path(path).name}" if path else f"{tokens} synthetic rows (normal, seed {SEED})"
        )

    def layer(self, number: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """x [T, D] of one layer."""
        if self.recorded is not None:
            return self.recorded.layer(number, self.tokens, dtype)
        generator = torch.Generator().manual_seed(SEED + number)
        try:
            return torch.randn(self.tokens, self.d_model, generator=generator).to(dtype)
        except (RuntimeError, TypeError) as e:
            raise LabError(f"no memory for {self.tokens} rows of D={self.d_model} (fp32). Take fewer tokens.") from e
