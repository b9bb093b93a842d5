"""The tokenizer: byte-level BPE with 4096 entries, GPT-2's splitting, id 0 the end of a document."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from data.recipe.config import END_OF_DOCUMENT, MODEL

END_TOKEN = "<eos>"


def train(texts: Iterable[str]) -> Any:
    """A `tokenizers.Tokenizer` learnt from `texts` (two seconds for the whole corpus)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MODEL["vocab_size"],
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load(path: Path) -> Any:
    """A saved tokenizer. ValueError when its id 0 is not the end of a document."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    if tokenizer.token_to_id(END_TOKEN) != END_OF_DOCUMENT:
        raise ValueError(f"{path}: {END_TOKEN} has id {tokenizer.token_to_id(END_TOKEN)}, wanted {END_OF_DOCUMENT}")
    return tokenizer


def encode(tokenizer: Any, documents: list[str]) -> list[np.ndarray]:
    """Each document as uint16 ids, the end token last."""
    return [np.array([*e.ids, END_OF_DOCUMENT], dtype=np.uint16) for e in tokenizer.encode_batch(documents)]


def vocabulary(tokenizer: Any) -> tuple[list[str], list[str]]:
    """Tokens in the order of their ids, and merges as "left right", as a GGUF stores them."""
    import json

    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return tokens, merges
