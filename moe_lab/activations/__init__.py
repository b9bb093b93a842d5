"""Inputs of MoE layers: recorded from a real model, or seeded noise that says so.

`record` holds the recording, `files` reads and writes it, `capture` takes it from a running model, `inputs` hands rows
to a model's layers. Claims about routing need recorded input: random x has no tokens in it.
"""

from moe_lab.activations.inputs import Inputs, require_recorded
from moe_lab.activations.record import Activations

__all__ = ["Activations", "Inputs", "require_recorded"]
