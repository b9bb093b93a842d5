"""Listening to the MoE blocks inside somebody's torch model while it runs: their inputs and their picks.

`find` recognises the blocks by the families' rows, `hooks` listens, `texts` turns what the user gives into token ids,
`run` drives the model one text at a time. Knows neither layers of ours nor transformers itself.
"""

from moe_lab.tap.find import TappedBlock, model_hash, model_name, moe_blocks
from moe_lab.tap.hooks import InputTap, PickTap, listening
from moe_lab.tap.run import run_texts
from moe_lab.tap.texts import TokenText, token_texts

__all__ = [
    "InputTap", "PickTap", "TappedBlock", "TokenText", "listening", "model_hash", "model_name", "moe_blocks",
    "run_texts", "token_texts",
]  # fmt: skip
