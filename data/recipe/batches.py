"""The training tokens, and batches of random windows of them."""

import lzma
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.recipe.config import TrainConfig


def training_tokens(corpus: Path) -> np.ndarray:
    """uint16 [T] of a corpus folder; 0 ends a document."""
    with lzma.open(corpus / "train_tokens.npy.xz") as file:
        return np.load(file)


class Batches:
    """Windows int64 [B, context + 1] in random order; every window of an epoch once, each epoch cut at a new offset."""

    def __init__(self, tokens: Tensor, config: TrainConfig, device: torch.device) -> None:
        self.tokens, self.config = tokens.to(device), config
        self.generator = torch.Generator().manual_seed(config.seed)
        self.starts, self.at = torch.empty(0, dtype=torch.int64), 0
        self.span = torch.arange(config.context + 1, device=device)

    def next(self) -> Tensor:
        """The next batch, on the device."""
        size = self.config.sequences_per_step
        if self.at + size > self.starts.numel():
            offset = int(torch.randint(self.config.context, (1,), generator=self.generator))
            count = (self.tokens.numel() - offset - 1) // self.config.context
            order = torch.randperm(count, generator=self.generator)
            self.starts, self.at = order * self.config.context + offset, 0
        starts = self.starts[self.at : self.at + size].to(self.tokens.device)
        self.at += size
        return self.tokens[starts[:, None] + self.span].long()
