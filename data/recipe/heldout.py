"""Held-out text as windows, the loss on it, and the routing it causes.

T tokens, L layers, E experts, K experts per token. A window is `context` tokens plus the one to predict after the
last; windows follow each other without overlap inside a domain, domains in the fixed order of the recipe.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.recipe.config import DOMAINS
from data.recipe.routers import RouterTap, lookahead_recall


@dataclass(frozen=True)
class Windows:
    """tokens int64 [W, context + 1], domain int64 [W] (index into DOMAINS)."""

    tokens: Tensor
    domain: Tensor

    @property
    def count(self) -> int:
        return self.tokens.shape[0]


@dataclass(frozen=True)
class HeldOut:
    """Mean loss in nats a token by domain, and ids int16 [L, T, K] of the experts chosen, in window order."""

    loss: dict[str, float]
    ids: np.ndarray
    recall_last_pair: float

    @property
    def mean_loss(self) -> float:
        """Mean over domains, each counted once."""
        return sum(self.loss.values()) / len(self.loss)

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean_loss)


def load_windows(path: Path, context: int, per_domain: int | None = None) -> Windows:
    """The windows of `val_tokens.npz`: one uint16 array a domain."""
    tokens, domain = [], []
    with np.load(path) as arrays:
        for index, name in enumerate(DOMAINS):
            stream = torch.from_numpy(arrays[name].astype(np.int64))
            windows = stream.unfold(0, context + 1, context)[:per_domain]
            tokens.append(windows)
            domain.append(torch.full((windows.shape[0],), index))
    return Windows(torch.cat(tokens), torch.cat(domain))


@torch.inference_mode()
def evaluate(
    model: nn.Module, taps: list[RouterTap], windows: Windows, *, batch: int = 64, autocast: bool = False
) -> HeldOut:
    """Run the model over all windows on its own device; `autocast` computes in bf16, else the weights' dtype."""
    device = next(model.parameters()).device
    total = torch.zeros(len(DOMAINS), dtype=torch.float64, device=device)
    count = torch.zeros(len(DOMAINS), dtype=torch.float64, device=device)
    ids: list[list[Tensor]] = [[] for _ in taps]
    recall: list[Tensor] = []
    for start in range(0, windows.count, batch):
        tokens = windows.tokens[start : start + batch].to(device)
        domain = windows.domain[start : start + batch].to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        total.index_add_(0, domain, loss.view(tokens.shape[0], -1).double().sum(1))
        count.index_add_(0, domain, torch.full_like(domain, tokens.shape[1] - 1, dtype=torch.float64))
        for layer, tap in enumerate(taps):
            ids[layer].append(tap.observed()[2].to(torch.int16))
        if len(taps) > 1:
            recall.append(lookahead_recall(taps[-2], taps[-1]) * tokens.shape[0])
    loss_by_domain = {name: (total[i] / count[i]).item() for i, name in enumerate(DOMAINS) if count[i] > 0}
    chosen = torch.stack([torch.cat(layer) for layer in ids]).cpu().numpy()
    return HeldOut(loss_by_domain, chosen, float(sum(recall)) / windows.count)
