"""A model run on texts, one at a time, unpadded, each token once."""

import inspect
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab.tap.texts import TokenText


def run_texts(model: torch.nn.Module, texts: Sequence[TokenText]) -> Generator[TokenText, None, None]:
    """Run `model` on each text (batch 1, no padding, no cache, eval mode, no gradients); yields the text when it ran.

    The model's modes are put back when the iterator ends or is closed. LabError for ids outside the vocabulary, and for
    a part of a model, which takes rows instead of token ids.
    """
    _check_vocabulary(model, texts)
    device, arguments = _device(model), _arguments(model)
    with _evaluating(model):
        for text in texts:
            with torch.no_grad():
                _call(model, text.ids.to(device)[None], arguments)
            yield text


def _arguments(model: torch.nn.Module) -> dict[str, Any]:
    """Arguments that this model's forward knows: no cache, and logits of one position instead of T times vocabulary."""
    known = inspect.signature(model.forward).parameters
    wanted = {"use_cache": False, "logits_to_keep": 1}
    return {name: value for name, value in wanted.items() if name in known}


def _call(model: torch.nn.Module, ids: Tensor, arguments: dict[str, Any]) -> None:
    known = inspect.signature(model.forward).parameters
    if "input_ids" in known:
        model(input_ids=ids, **arguments)
        return
    first = next(iter(known), "")
    if first == "hidden_states":  # transformers' name for rows: a decoder layer or a block of one
        raise LabError(f"{type(model).__name__} takes rows, not token ids; pass the whole model around it.")
    model(ids, **arguments)


def _device(model: torch.nn.Module) -> torch.device:
    first = next(iter(model.parameters()), None)
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device


def _check_vocabulary(model: torch.nn.Module, texts: Sequence[TokenText]) -> None:
    """LabError for ids outside the embedding, which on a device would end the process's CUDA context."""
    table = getattr(getattr(model, "get_input_embeddings", lambda: None)(), "weight", None)
    for number, text in enumerate(texts):
        if int(text.ids.min()) < 0 or (table is not None and int(text.ids.max()) >= table.shape[0]):
            wanted = "0 or more" if table is None else f"0..{table.shape[0] - 1}"
            raise LabError(
                f"text {number} holds token ids {int(text.ids.min())}..{int(text.ids.max())}; wanted {wanted}."
            )


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode (training adds jitter to some routers); each module gets its own mode back."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
