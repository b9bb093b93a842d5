"""Rows for a model's MoE layers: a recording where one fits, else seeded noise; and who may claim what about them."""

from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from moe_lab._types import Tensor
from moe_lab.activations.record import Activations
from moe_lab.errors import LabError

SEED = 0


@runtime_checkable
class Source(Protocol):
    """Anything that says whether its rows are noise: Inputs, Activations."""

    @property
    def synthetic(self) -> bool:
        """True for noise."""
        ...


def require_recorded(inputs: Source, claim: str) -> None:
    """LabError when `inputs` are noise: `claim` (as in "the skew of the load") would be about the noise."""
    if inputs.synthetic:
        beside = f" No recording stands at {inputs.beside}." if isinstance(inputs, Inputs) else ""
        raise LabError(
            f"{claim} cannot be read off synthetic rows, which hold no tokens.{beside} Record a model's own with "
            "lab.Activations.capture(model, texts) and pass that file (on the command line: --input)."
        )


class Inputs:
    """Rows for the MoE layers of one model: recorded where a recording fits, else seeded noise.

    `recorded`: a file that Activations.load reads, or None to take `activations.npz` beside the model when there is
    one (inside it, for a folder); `beside` is where that one is looked for. `about` says in a sentence what the rows
    are; `synthetic` is True for noise, about which no claim on routing may be made (`require_recorded`).
    """

    def __init__(self, model: str | Path, d_model: int, tokens: int, recorded: str | Path | None = None) -> None:
        self.beside = (Path(model) if Path(model).is_dir() else Path(model).parent) / "activations.npz"
        path = recorded if recorded is not None else self.beside if self.beside.is_file() else None
        self.recorded = Activations.load(path) if path is not None else None
        if self.recorded is not None and self.recorded.d_model != d_model:
            raise LabError(f"{path} holds rows of D={self.recorded.d_model}, {model} wants D={d_model}.")
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
