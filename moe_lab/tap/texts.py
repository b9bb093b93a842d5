"""What the user hands over as texts -> token ids, one text after another."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moe_lab._types import Tensor
from moe_lab.checks import came, wants_whole
from moe_lab.errors import LabError, LabTypeError


@dataclass(frozen=True, slots=True, eq=False)
class TokenText:
    """Token ids int64 [T] of one text, on the CPU, and its domain."""

    ids: Tensor
    domain: str | None = None


def token_texts(
    texts: Any, tokenizer: Any = None, *, domains: str | Sequence[str] | None = None, max_tokens: int | None = None
) -> list[TokenText]:
    """Texts in the order given. `texts`: a string, token ids [T], token ids [B, T] (B texts), or a sequence of such.

    Strings want `tokenizer`: transformers', one of the package tokenizers, or a function text -> ids. `domains`: one
    name for all texts, or one each. `max_tokens` in all: the last text is cut, later ones are left out. LabError for no
    text, an empty one, a string without a tokenizer, or another number of domains.
    """
    if max_tokens is not None and wants_whole("max_tokens", max_tokens) < 1:
        raise LabError(f"max_tokens={max_tokens}: wanted 1 or more.")
    _check_tokenizer(tokenizer)
    ids = [_ids(text, tokenizer, i) for i, text in enumerate(_singles(texts))]
    if not ids:
        raise LabError("there is no text to run the model on.")
    if domains is not None and not isinstance(domains, str | Sequence | np.ndarray):
        raise LabTypeError(f"domains is {came(domains)}; wanted one name for all texts, or a name for each.")
    names = [domains] * len(ids) if domains is None or isinstance(domains, str) else list(domains)
    if len(names) != len(ids):
        raise LabError(f"{len(names)} domains for {len(ids)} texts; wanted one each, or one for all.")
    out, left = [], max_tokens
    for one, name in zip(ids, names, strict=True):
        if left is not None:
            one, left = one[:left], left - min(left, len(one))
        if len(one):
            out.append(TokenText(one, None if name is None else str(name)))
    return out


def _check_tokenizer(tokenizer: Any) -> None:
    """LabTypeError for what cannot turn a text into ids. A path has `encode` too, which gives bytes."""
    if tokenizer is None or callable(tokenizer) or (hasattr(tokenizer, "encode") and not isinstance(tokenizer, str)):
        return
    fix = ": tokenizers.Tokenizer.from_file(path) reads one" if isinstance(tokenizer, str | os.PathLike) else ""
    raise LabTypeError(f"tokenizer is {came(tokenizer)}; wanted a tokenizer or a function text -> ids{fix}.")


def _singles(texts: Any) -> Iterable[Any]:
    """Each text by itself."""
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, (Tensor, np.ndarray)):
        if texts.ndim not in (1, 2):
            raise LabError(f"token ids have shape {tuple(texts.shape)}; wanted [T] or [B, T].")
        return [texts] if texts.ndim == 1 else list(texts)
    if isinstance(texts, Mapping) or not isinstance(texts, Iterable):
        raise LabTypeError(f"texts is a {type(texts).__name__}; wanted strings or token ids.")
    items = list(texts)
    if items and all(isinstance(i, (int, np.integer)) for i in items):
        return [items]
    return [single for item in items for single in ([item] if _is_flat(item) else _singles(item))]


def _is_flat(item: Any) -> bool:
    return isinstance(item, str) or not isinstance(item, (Tensor, np.ndarray))


def _ids(text: Any, tokenizer: Any, number: int) -> Tensor:
    if isinstance(text, str):
        if tokenizer is None:
            raise LabError("the texts are strings: pass tokenizer= (or token ids instead of strings).")
        text = _encode(tokenizer, text)
    try:
        ids = torch.as_tensor(text)
    except (TypeError, ValueError, RuntimeError) as e:
        raise LabTypeError(f"text {number} is a {type(text).__name__}; wanted a string or token ids.") from e
    if ids.numel() == 0:
        raise LabError(f"text {number} has no tokens.")
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise LabTypeError(f"text {number} holds {ids.dtype}; token ids are whole numbers.")
    if ids.ndim != 1:
        raise LabError(f"text {number} has shape {tuple(ids.shape)}; wanted token ids [T].")
    return ids.long().cpu()


def _encode(tokenizer: Any, text: str) -> Any:
    out = tokenizer(text) if callable(tokenizer) else tokenizer.encode(text)
    if isinstance(out, Mapping):
        return out["input_ids"]
    return getattr(out, "ids", out)
