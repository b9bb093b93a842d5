"""Record what the shipped weights do with held-out text: `python -m data.recipe.record --corpus DIR`.

T tokens, L layers, D model width, K experts per token. transformers runs the decoded weights in fp32 and its
own routers choose. Writes
  trace.parquet     routing of 65,536 tokens (8 domains, 32 windows of 256) in all L layers, domains one after another;
                    margin (probability of the K-th minus the (K+1)-th expert) rounded to half precision for size;
  activations.npz   x fp16 [L, 512, D], the inputs of the MoE layers for 64 tokens of each domain, with token_ids
                    int32 [512], domain str [512] and trace_token int64 [512], the token's number in the trace.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.recipe.config import DOMAINS, TrainConfig
from data.recipe.heldout import Windows, load_windows
from data.recipe.routers import RouterTap, tap_routers
from data.recipe.shipped import shipped_model
from moe_lab.checkpoint.gguf import GgufFile
from moe_lab.trace import RoutingTrace

WINDOWS_PER_DOMAIN, ACTIVATION_TOKENS, ACTIVATION_FROM = 32, 64, 64
"""Activations: 64 tokens in a row from position 64 of each domain's first window, where context has built up."""


@dataclass
class LayerRecord:
    """One layer's routing of all tokens: ids [T, K], weights [T, K], margin [T]; x [512, D] of the chosen tokens."""

    ids: list[np.ndarray]
    weights: list[np.ndarray]
    margin: list[np.ndarray]
    x: list[np.ndarray]

    @classmethod
    def empty(cls) -> "LayerRecord":
        return cls([], [], [], [])

    def add(self, tap: RouterTap, wanted: torch.Tensor) -> None:
        x, logits, ids = tap.observed()
        score = logits.double().softmax(-1)
        ranked = score.topk(ids.shape[-1] + 1, dim=-1).values
        self.ids.append(ids.numpy())
        self.weights.append(score.gather(-1, ids).float().numpy())
        self.margin.append((ranked[:, -2] - ranked[:, -1]).half().float().numpy())
        self.x.append(x[wanted].numpy())


def activation_tokens(windows: Windows) -> np.ndarray:
    """Numbers (in window order) of the tokens whose activations are kept, int64 [512]."""
    context = windows.tokens.shape[1] - 1
    first = [int((windows.domain == d).nonzero()[0, 0]) for d in windows.domain.unique().tolist()]
    within = np.arange(ACTIVATION_FROM, ACTIVATION_FROM + ACTIVATION_TOKENS)
    return np.concatenate([window * context + within for window in first])


@torch.inference_mode()
def run(model: Any, windows: Windows, kept: np.ndarray, batch: int = 16) -> list[LayerRecord]:
    """Run all windows; one record a layer."""
    taps = tap_routers(model)
    records = [LayerRecord.empty() for _ in taps]
    context = windows.tokens.shape[1] - 1
    for start in range(0, windows.count, batch):
        tokens = windows.tokens[start : start + batch, :-1]
        model.model(input_ids=tokens, use_cache=False)
        here = kept[(kept >= start * context) & (kept < (start + tokens.shape[0]) * context)] - start * context
        for record, tap in zip(records, taps, strict=True):
            record.add(tap, torch.from_numpy(here))
    return records


def build_trace(records: list[LayerRecord], windows: Windows, model_hash: str, experts: int) -> RoutingTrace:
    """The trace of all tokens."""
    context = windows.tokens.shape[1] - 1
    return RoutingTrace.from_layers(
        {i: np.concatenate(r.ids) for i, r in enumerate(records)},
        {i: np.concatenate(r.weights) for i, r in enumerate(records)},
        num_experts=experts,
        width=experts,
        model_hash=model_hash,
        token_ids=windows.tokens[:, :-1].reshape(-1).numpy().astype(np.int32),
        domains=np.array(DOMAINS)[windows.domain.repeat_interleave(context).numpy()],
        margin=np.stack([np.concatenate(r.margin) for r in records], 1),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("data/lab-42m.gguf"))
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("data"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    windows = load_windows(args.corpus / "val_tokens.npz", TrainConfig().context, WINDOWS_PER_DOMAIN)
    kept = activation_tokens(windows)
    model = shipped_model(args.model)
    records = run(model, windows, kept)
    with GgufFile(args.model) as file:
        trace = build_trace(records, windows, file.model_hash, model.config.num_experts)
    trace.save(args.out / "trace.parquet")
    assert trace.token_ids is not None
    assert trace.domains is not None
    np.savez_compressed(
        args.out / "activations.npz",
        x=np.stack([np.concatenate(r.x) for r in records]).astype(np.float16),
        token_ids=trace.token_ids[kept],
        domain=trace.domains[kept].astype(str),
        trace_token=kept,
    )
    for name in ("trace.parquet", "activations.npz"):
        print(f"{args.out / name}: {(args.out / name).stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
