"""How good is the shipped file? `python -m data.recipe.evaluate --corpus DIR [--weights DIR]` writes data/stats.json.

Held-out loss by domain of the shipped weights (decoded, fp32 arithmetic) and, given the bf16 shards, of the weights
before quantising; the routing statistics and the gate on all held-out tokens. Exit 1 when a condition of the gate
does not hold.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.recipe import shards
from data.recipe.batches import training_tokens
from data.recipe.config import TrainConfig
from data.recipe.gate import judge, table
from data.recipe.heldout import HeldOut, Windows, evaluate, load_windows
from data.recipe.leakage import SeenPassages
from data.recipe.routers import tap_routers
from data.recipe.samples import samples
from data.recipe.shipped import model_from, shipped_model


def held_out(model: Any, windows: Windows) -> HeldOut:
    """Loss and routing in fp32; leaves the model usable."""
    return evaluate(model, tap_routers(model), windows, batch=16)


def leaked_shares(corpus: Path) -> dict[str, float]:
    """Part of each domain's held-out passages that the training tokens hold too."""
    seen = SeenPassages(training_tokens(corpus))
    with np.load(corpus / "val_tokens.npz") as arrays:
        return {name: seen.share(arrays[name]) for name in arrays.files}


def training_summary(gate_json: Path) -> dict[str, Any]:
    """What the training run wrote about itself, without its samples and curves."""
    run = json.loads(gate_json.read_text())
    history = {k: v for k, v in run["history"].items() if k != "controls"}
    return {"history": history} | {name: run[name] for name in ("config", "device", "torch", "wall_s")}


def statistics(shipped: HeldOut, latent: HeldOut | None, experts: int) -> dict[str, Any]:
    """Losses, perplexities and the gate's verdict. Without bf16 weights the loss increase is NaN, which fails."""
    increase = shipped.mean_loss - latent.mean_loss if latent else math.nan
    verdict = judge(shipped.ids, np.arange(shipped.ids.shape[1]), experts, shipped.recall_last_pair, increase)
    stats = {
        "loss": shipped.loss,
        "mean_loss": shipped.mean_loss,
        "perplexity": shipped.perplexity,
        "perplexity_by_domain": {name: math.exp(loss) for name, loss in shipped.loss.items()},
        "gate": verdict,
    }
    if latent:
        stats |= {"loss_bf16": latent.loss, "mean_loss_bf16": latent.mean_loss, "perplexity_bf16": latent.perplexity}
    return stats


def show(stats: dict[str, Any]) -> str:
    lines = ["domain      bf16 loss  shipped loss  shipped perplexity"]
    for name, loss in {**stats["loss"], "mean": stats["mean_loss"]}.items():
        latent = {**stats.get("loss_bf16", {}), "mean": stats.get("mean_loss_bf16", math.nan)}.get(name, math.nan)
        lines.append(f"{name:<10}  {latent:9.4f}  {loss:12.4f}  {math.exp(loss):18.2f}")
    return "\n".join([*lines, table(stats["gate"])])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("data/lab-42m.gguf"))
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--weights", type=Path, default=None, help="folder with the bf16 shards and gate.json")
    parser.add_argument("--out", type=Path, default=Path("data/stats.json"))
    parser.add_argument("--windows", type=int, default=None, help="only so many windows of each domain (a quick look)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    windows = load_windows(args.corpus / "val_tokens.npz", TrainConfig().context, args.windows)
    model = shipped_model(args.model)
    shipped = held_out(model, windows)
    latent = held_out(model_from(shards.join(args.weights)), windows) if args.weights else None
    stats = statistics(shipped, latent, model.config.num_experts)
    stats |= {"model_sha256": shards.sha256(args.model), "leaked_share": leaked_shares(args.corpus)}
    if args.weights and (args.weights / "gate.json").is_file():
        stats["training"] = training_summary(args.weights / "gate.json")
    stats["samples"] = samples(model, args.corpus / "tokenizer.json")
    args.out.write_text(json.dumps(stats, indent=1) + "\n")
    print(show(stats))
    return 0 if stats["gate"]["all_passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
