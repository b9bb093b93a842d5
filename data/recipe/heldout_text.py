"""Text the model has not been trained on: `python -m data.recipe.heldout_text --corpus DIR` writes data/heldout.txt.

First the held-out tokens of Austen, the Python documentation and the Python library, decoded; then further documents
of the Python documentation, until MINIMUM_BYTES are reached. A document that repeats its training neighbours (a
quarter of the library's held-out passages do: tables of codecs, licence headers) is left out. Public domain and PSF
text only. Documents are separated by a line holding one form feed.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from data.recipe import tokenizer as bpe
from data.recipe.batches import training_tokens
from data.recipe.config import END_OF_DOCUMENT
from data.recipe.extract import EXTRACTORS
from data.recipe.leakage import PASSAGE, SeenPassages
from data.recipe.packages import SOURCES, unpack

DOMAINS = ("austen", "pydoc_rst", "py_stdlib")
MINIMUM_BYTES, MAXIMUM_BYTES, SEEN_LIMIT, SHORTEST = 260_000, 500_000, 0.03, 2_000
SEPARATOR = "\n\f\n"


def decode_documents(tokens: np.ndarray, tokenizer: Any) -> list[str]:
    """The documents of a token stream; a last one that is cut off loses the bytes of a broken character."""
    ends = np.flatnonzero(tokens == END_OF_DOCUMENT)
    parts = np.split(tokens, ends + 1)
    texts = [tokenizer.decode([int(t) for t in part if t != END_OF_DOCUMENT]) for part in parts]
    return [text.strip("\n").rstrip("\ufffd") for text in texts if text.strip()]


def unseen(texts: list[str], tokenizer: Any, seen: SeenPassages) -> list[str]:
    """Documents of some length of which less than SEEN_LIMIT of the passages were trained on."""
    long = [text for text in texts if len(text.encode()) >= SHORTEST]
    return [t for t, ids in zip(long, bpe.encode(tokenizer, long), strict=True) if seen.share(ids) < SEEN_LIMIT]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("data/recipe/work"), help="packages and unpacked files")
    parser.add_argument("--out", type=Path, default=Path("data/heldout.txt"))
    args = parser.parse_args()
    tokenizer = bpe.load(args.corpus / "tokenizer.json")
    seen = SeenPassages(training_tokens(args.corpus))
    with np.load(args.corpus / "val_tokens.npz") as arrays:
        for name in arrays.files:
            print(
                f"{name:<10} {100 * seen.share(arrays[name]):5.1f} % of the {PASSAGE}-token passages occur in training"
            )
        held_out = [text for name in DOMAINS for text in decode_documents(arrays[name], tokenizer)]
    texts = unseen(held_out, tokenizer, seen)
    source = next(s for s in SOURCES if s.domain == "pydoc_rst")
    folders, _ = unpack(source, args.work)
    more = unseen(list(EXTRACTORS[source.domain](folders)), tokenizer, seen)
    while more and len(SEPARATOR.join(texts).encode()) < MINIMUM_BYTES:
        texts.append(more.pop(0).strip("\n"))
    content = SEPARATOR.join(texts) + "\n"
    size = len(content.encode())
    if not MINIMUM_BYTES <= size <= MAXIMUM_BYTES:
        raise ValueError(f"held-out text has {size} bytes, wanted {MINIMUM_BYTES} to {MAXIMUM_BYTES}")
    args.out.write_text(content)
    print(f"{args.out}: {size} bytes, {len(texts)} documents")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
