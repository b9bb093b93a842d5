"""Train lab-42m on one GPU: `python -m data.recipe.train --corpus DIR --out DIR` (200 s on an H200).

DIR holds train_tokens.npy.xz (uint16, 0 ends a document), val_tokens.npz (one array a domain) and tokenizer.json. With
`--fill-time` the step time is measured first, then the number of steps is fixed so that the cosine ends within
`--seconds`. `--smoke` is a run of a minute for a CPU. Writes all shards into --weights, and into --out gate.json,
log.csv, the manifest and the first four shards. Seeded, but not bit-reproducible: how often the quantised copies are
refreshed follows measured times.
"""

import argparse
import json
import shutil
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

if __package__ in (None, ""):  # started as a script on a machine where the project is not installed
    _ROOT = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(_ROOT), str(_ROOT / "kernels")]

import numpy as np
import torch

from data.recipe import shards
from data.recipe.batches import training_tokens
from data.recipe.config import SMOKE_MODEL, TrainConfig, model_config
from data.recipe.gate import judge, table
from data.recipe.heldout import Windows, load_windows
from data.recipe.qat import plain_state_dict
from data.recipe.samples import samples
from data.recipe.trainer import Trainer

SMOKE = replace(
    TrainConfig(),
    steps=6,
    sequences_per_step=2,
    warmup_steps=1,
    probe_steps=(1, 2),
    control_every=2,
    evaluate_every=3,
    reserve_s=1.0,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", type=Path, default=Path("/tmp/lab42m"), help="all shards go here")
    parser.add_argument("--seconds", type=float, default=420.0, help="wall time of the whole run")
    parser.add_argument("--steps", type=int, default=None, help="number of steps, if not that of the shipped model")
    parser.add_argument("--fill-time", action="store_true", help="as many steps as --seconds allows")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and a few steps: does everything run?")
    return parser.parse_args()


def final_evaluation(trainer: Trainer, windows: Windows, tokenizer: Path, cache_windows: int) -> dict:
    """Losses of the latent bf16 weights and of the quantised ones, the gate on the quantised ones, and samples."""
    latent = trainer.held_out(windows, quantised=False)
    shipped = trainer.held_out(windows, quantised=True)
    context = windows.tokens.shape[1] - 1
    first = np.concatenate(
        [np.flatnonzero(windows.domain.numpy() == d)[:cache_windows] for d in windows.domain.unique().tolist()]
    )
    tokens = (first[:, None] * context + np.arange(context)).reshape(-1)
    increase = shipped.mean_loss - latent.mean_loss
    verdict = judge(shipped.ids, tokens, trainer.experts, shipped.recall_last_pair, increase)
    return {
        **verdict,
        "loss_bf16": latent.loss,
        "loss_quantised": shipped.loss,
        "mean_loss_bf16": latent.mean_loss,
        "mean_loss_quantised": shipped.mean_loss,
        "perplexity_quantised": shipped.perplexity,
        "samples": samples(trainer.model, tokenizer),
    }


def main() -> int:
    started = time.perf_counter()
    args = arguments()
    config = SMOKE if args.smoke else TrainConfig()
    steps = None if args.fill_time else args.steps or config.steps
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.smoke:
        print("no GPU: training would take days here; use --smoke to try the script", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    windows = load_windows(args.corpus / "val_tokens.npz", config.context, 1 if args.smoke else None)
    tokens = torch.from_numpy(training_tokens(args.corpus).astype(np.int32))
    model = model_config(**(SMOKE_MODEL if args.smoke else {}))
    trainer = Trainer(model, config, tokens, windows, device, args.out / "log.csv")
    history = trainer.run(deadline=started + args.seconds, steps=steps)

    trainer.round_to_bf16()
    paths = shards.save(plain_state_dict(trainer.model), args.weights)
    for path in [args.weights / shards.MANIFEST, *paths[: min(4, (len(paths) + 1) // 2)]]:
        shutil.copy(path, args.out)
    result = final_evaluation(trainer, windows, args.corpus / "tokenizer.json", 1 if args.smoke else 10)
    result |= {"history": history, "config": asdict(config), "device": trainer.device_name, "torch": torch.__version__}
    result["wall_s"] = time.perf_counter() - started
    (args.out / "gate.json").write_text(json.dumps(result, indent=1) + "\n")
    report(result, paths)
    return 0


def report(result: dict, paths: list[Path]) -> None:
    for row in result["samples"]:
        print(f"--- {row['how']}: {row['text']!r}")
    print(f"shards: {[path.name for path in paths]} in {paths[0].parent}")
    print("history:", json.dumps(result["history"]))
    for domain, loss in result["loss_quantised"].items():
        print(f"{domain:<10} bf16 {result['loss_bf16'][domain]:.4f}  quantised {loss:.4f} nats a token")
    print(f"mean       bf16 {result['mean_loss_bf16']:.4f}  quantised {result['mean_loss_quantised']:.4f}")
    print(table(result))
    print(f"{'PASSED' if result['all_passed'] else 'NOT PASSED'} in {result['wall_s']:.0f} s")


if __name__ == "__main__":
    raise SystemExit(main())
