"""Recording what a running model feeds its MoE layers."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch

from moe_lab._types import Tensor
from moe_lab.activations.record import FP16_MAX, Activations
from moe_lab.errors import LabError
from moe_lab.families import Family
from moe_lab.tap import InputTap, TappedBlock, listening, model_hash, model_name, moe_blocks, run_texts, token_texts

DTYPES = {"float16": np.float16, "float32": np.float32}


def capture(
    model: torch.nn.Module,
    texts: Any,
    *,
    tokenizer: Any,
    max_tokens: int | None,
    layers: Sequence[int] | None,
    domains: str | Sequence[str] | None,
    dtype: str | None,
    family: str | Family | None,
) -> Activations:
    """See Activations.capture."""
    if dtype is not None and dtype not in DTYPES:
        raise LabError(f"dtype is {dtype!r}; wanted float16, float32 or None.")
    blocks = moe_blocks(model, layers, family)
    queue = token_texts(texts, tokenizer, domains=domains, max_tokens=max_tokens)
    x, at = _Block(len(blocks), sum(len(text.ids) for text in queue)), 0
    taps = [InputTap(block) for block in blocks]
    with listening(*taps), closing(run_texts(model, queue)) as runs:
        for text in runs:
            for i, tap in enumerate(taps):
                x.put(i, at, _stored(tap.take(len(text.ids)), dtype, tap.block))
            at += len(text.ids)
    return Activations(
        x.values,
        tuple(block.number for block in blocks),
        np.concatenate([text.ids.numpy() for text in queue]).astype(np.int32),
        None if domains is None else np.array([text.domain for text in queue for _ in range(len(text.ids))]),
        model_name(model),
        model_hash(model),
    )


class _Block:
    """x [L, T, D], filled row by row so that nothing is held twice; float16 until something needs float32."""

    def __init__(self, layers: int, tokens: int) -> None:
        self.layers, self.tokens = layers, tokens
        self.values = np.empty((layers, tokens, 0), np.float16)

    def put(self, layer: int, at: int, rows: np.ndarray) -> None:
        """Rows of one layer from token `at` on. LabError for another width than the first."""
        if not self.values.shape[2]:
            try:
                self.values = np.zeros((self.layers, self.tokens, rows.shape[1]), rows.dtype)
            except MemoryError as e:
                raise LabError(f"no memory for x {[self.layers, self.tokens, rows.shape[1]]}: lower max_tokens.") from e
        if rows.shape[1] != self.values.shape[2]:
            raise LabError(
                f"the MoE layers read rows of D={self.values.shape[2]} and of D={rows.shape[1]}: choose layers= of one."
            )
        if rows.dtype == np.float32 and self.values.dtype == np.float16:
            self.values = self.values.astype(np.float32)
        self.values[layer, at : at + len(rows)] = rows


def _stored(x: Tensor, dtype: str | None, block: TappedBlock) -> np.ndarray:
    """x as it is kept. LabError for what is not finite, or lies beyond a float16 that was asked for."""
    values = x.float().cpu().numpy()
    finite = np.isfinite(values)
    if not finite.all():
        row = int(np.flatnonzero(~finite.all(axis=1))[0])
        raise LabError(f"the model feeds layer {block.number} values that are not finite (token {row} of the text).")
    largest = float(np.abs(values).max(initial=0.0))
    if largest > FP16_MAX and dtype == "float16":
        raise LabError(f"the model feeds layer {block.number} {largest:.6g}, beyond float16: pass dtype='float32'.")
    kept = np.float32 if dtype == "float32" or largest > FP16_MAX else np.float16
    return values.astype(kept)
