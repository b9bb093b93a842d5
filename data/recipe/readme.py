"""Refresh the measured parts of data/README.md: `python -m data.recipe.readme`.

The file is written by hand but for two blocks between marker comments: the table of shipped files with their hashes,
and the tables of results out of data/stats.json.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from data.recipe.shards import sha256

FOLDER = Path(__file__).resolve().parents[1]
FILES = {
    "lab-42m.gguf": "the model: GGUF, architecture `qwen2moe`",
    "tokenizer.json": "its tokenizer, for the `tokenizers` library (the GGUF holds it too)",
    "trace.parquet": "routing of 65,536 held-out tokens in 6 layers",
    "activations.npz": "inputs of the 6 MoE layers for 512 held-out tokens, fp16",
    "heldout.txt": "text the model has not read (Austen, Python)",
    "stats.json": "the results below, in full, with samples of text",
    "train_log.csv": "the training run, a row every 20 steps",
}


def file_table() -> str:
    rows = ["| file | bytes | what | sha256 |", "|---|---|---|---|"]
    for name, what in FILES.items():
        rows.append(f"| `{name}` | {(FOLDER / name).stat().st_size:,} | {what} | `{sha256(FOLDER / name)}` |")
    return "\n".join(rows)


def loss_table(stats: dict[str, Any]) -> str:
    rows = [
        "| domain | bf16 loss | loss as shipped | perplexity as shipped | passages also in training |",
        "|---|---|---|---|---|",
    ]
    for name, loss in stats["loss"].items():
        leaked = 100 * stats["leaked_share"][name]
        rows.append(f"| {name} | {stats['loss_bf16'][name]:.4f} | {loss:.4f} | {math.exp(loss):.2f} | {leaked:.1f} % |")
    mean = f"**{stats['mean_loss_bf16']:.4f}** | **{stats['mean_loss']:.4f}** | **{stats['perplexity']:.2f}**"
    return "\n".join([*rows, f"| **mean** | {mean} | |"])


def routing_table(stats: dict[str, Any]) -> str:
    layers = stats["gate"]["by_layer"]
    names = {
        "min_share": "least used expert",
        "max_share": "most used",
        "top_quarter_share": "top quarter",
        "overlap": "kept from token to token",
        "lru": "LRU hits",
        "lru_shuffled": "LRU, shuffled tokens",
        "belady": "Belady hits",
    }
    rows = ["| layer | " + " | ".join(names.values()) + " |", "|---" * (len(names) + 1) + "|"]
    for layer in range(len(layers["lru"])):
        rows.append(f"| {layer} | " + " | ".join(f"{100 * layers[name][layer]:.1f} %" for name in names) + " |")
    return "\n".join(rows)


def gate_table(stats: dict[str, Any]) -> str:
    gate = stats["gate"]
    rows = ["| condition | wanted | measured |", "|---|---|---|"]
    for name, value in gate["seen"].items():
        sign = "at most" if name == "loss_increase" else "at least"
        rows.append(
            f"| {name} | {sign} {gate['limits'][name]} | {value:.4f}{'' if gate['passed'][name] else ' FAIL'} |"
        )
    return "\n".join(rows)


def replace_block(text: str, name: str, content: str) -> str:
    """`text` with what stands between the two markers of `name` replaced. ValueError when they are missing."""
    pattern = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"README.md has no block {name!r}")
    return pattern.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)


def refresh(text: str) -> str:
    """The README with its measured blocks brought up to date."""
    stats = json.loads((FOLDER / "stats.json").read_text())
    text = replace_block(text, "files", file_table())
    results = "\n\n".join((loss_table(stats), gate_table(stats), routing_table(stats)))
    return replace_block(text, "results", results)


if __name__ == "__main__":
    path = FOLDER / "README.md"
    path.write_text(refresh(path.read_text()))
