"""Rebuild a corpus equal in kind to the one lab-42m was trained on: `python -m data.recipe.corpus --out DIR`.

Eight domains of at most 6 MB of text each; a domain's documents are shuffled with a seed and the last 2 % (by bytes)
held out; the training documents of all domains are shuffled together. Writes train_tokens.npy.xz (uint16, 0 ends a
document), val_tokens.npz (at most 20,000 tokens a domain), tokenizer.json and sources.json. The corpus stays out of
git.
"""

import argparse
import json
import lzma
import random
from pathlib import Path
from typing import Any

import numpy as np

from data.recipe import tokenizer as bpe
from data.recipe.config import END_OF_DOCUMENT
from data.recipe.extract import EXTRACTORS
from data.recipe.packages import SOURCES, Source, unpack

LIMIT_BYTES, HELD_OUT_SHARE, HELD_OUT_TOKENS, SEED = 6_000_000, 0.02, 20_000, 7
LONG_DOCUMENT_BYTES = 60_000
"""Novels are cut at paragraphs into pieces of this size: else one held-out document would be a sixth of its domain."""


def cut(document: str, limit: int = LONG_DOCUMENT_BYTES) -> list[str]:
    """Pieces of at most about `limit` bytes, cut at empty lines; a short document stays whole."""
    if len(document.encode()) <= limit:
        return [document]
    pieces, piece, size = [], [], 0
    for paragraph in document.split("\n\n"):
        if piece and size + len(paragraph.encode()) > limit:
            pieces.append("\n\n".join(piece))
            piece, size = [], 0
        piece.append(paragraph)
        size += len(paragraph.encode()) + 2
    return [*pieces, "\n\n".join(piece)]


def documents(source: Source, work: Path) -> tuple[list[str], list[str]]:
    """At most LIMIT_BYTES of a domain's non-empty documents in shuffled order, and the packages' versions."""
    folders, versions = unpack(source, work)
    found = [piece for text in EXTRACTORS[source.domain](folders) for piece in cut(text) if piece.strip()]
    if not found:
        raise RuntimeError(f"{source.domain}: no text found in {', '.join(source.packages)}")
    random.Random(f"{SEED} {source.domain}").shuffle(found)
    kept, size = [], 0
    for text in found:
        size += len(text.encode())
        if size > LIMIT_BYTES:
            break
        kept.append(text)
    return kept, versions


def split_held_out(texts: list[str]) -> tuple[list[str], list[str]]:
    """(training, held out): documents from the end until the held-out part has its share of the bytes."""
    total, size, at = sum(len(text.encode()) for text in texts), 0, len(texts)
    while at > 1 and size < HELD_OUT_SHARE * total:
        at -= 1
        size += len(texts[at].encode())
    return texts[:at], texts[at:]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("data/recipe/work"), help="packages and unpacked files")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    training, held_out, about = {}, {}, []
    for source in SOURCES:
        texts, versions = documents(source, args.work)
        training[source.domain], held_out[source.domain] = split_held_out(texts)
        size = sum(len(text.encode()) for text in texts)
        about.append({"domain": source.domain, "packages": versions, "licence": source.licence, "text_bytes": size})
        print(f"{source.domain:<10} {len(texts):6d} documents {size / 1e6:6.2f} MB  {', '.join(versions)}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = bpe.train(text for texts in training.values() for text in texts)
    tokenizer.save(str(args.out / "tokenizer.json"))
    streams = [ids for texts in training.values() for ids in bpe.encode(tokenizer, texts)]
    random.Random(SEED).shuffle(streams)
    tokens = np.concatenate([np.array([END_OF_DOCUMENT], dtype=np.uint16), *streams])
    with lzma.open(args.out / "train_tokens.npy.xz", "wb", preset=3) as file:
        np.save(file, tokens)
    validation: dict[str, Any] = {
        name: np.concatenate(bpe.encode(tokenizer, t))[:HELD_OUT_TOKENS] for name, t in held_out.items()
    }
    np.savez_compressed(args.out / "val_tokens.npz", **validation)
    (args.out / "sources.json").write_text(json.dumps(about, indent=1) + "\n")
    print(f"{tokens.size / 1e6:.2f} M training tokens, {sum(v.size for v in validation.values())} held-out tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
