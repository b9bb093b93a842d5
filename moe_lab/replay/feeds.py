"""What a replay hands to each layer in each step: recorded rows, or a trace's picks with noise for rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moe_lab._types import Tensor
from moe_lab.activations import Activations, Inputs
from moe_lab.checks import wants_whole, wants_wholes
from moe_lab.errors import LabError, LabTypeError
from moe_lab.layer import MoELayer
from moe_lab.open import Checkpoint
from moe_lab.routing import Routing
from moe_lab.trace import NO_PICK, RoutingTrace

Given = Activations | Inputs | RoutingTrace


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """T tokens for `layers` in `steps` steps of at most `step_tokens`. `about` says in words what the rows are."""

    layers: tuple[int, ...]
    tokens: int
    step_tokens: int
    about: str
    rows: dict[int, Tensor]
    trace: RoutingTrace | None

    @property
    def steps(self) -> int:
        """Steps that all tokens take."""
        return -(-self.tokens // self.step_tokens)

    def span(self, step: int) -> slice:
        """The tokens of a step."""
        return slice(step * self.step_tokens, min(self.tokens, (step + 1) * self.step_tokens))

    def x(self, step: int, layer: int) -> Tensor:
        """Rows [T, D] of a step."""
        return self.rows[layer][self.span(step)]

    def routing(self, step: int, moe: MoELayer) -> Routing | None:
        """The picks a trace tells, on the layer's device; None where the layer's own router picks."""
        if self.trace is None or moe.number is None:
            return None
        return picks_of(self.trace, self.span(step), moe)


def picks_of(trace: RoutingTrace, span: slice, moe: MoELayer) -> Routing:
    """Picks of some tokens in one layer; equal weights where the trace has none."""
    assert moe.number is not None
    place = trace.layers.index(moe.number)
    picked = trace.ids[span, place]
    ids = torch.from_numpy(np.where(picked == NO_PICK, -1, picked.astype(np.int64)).astype(np.int32))
    if trace.has_weights:
        weights = torch.from_numpy(trace.weights[span, place].astype(np.float32))
    else:
        weights = torch.full(ids.shape, 1.0 / trace.top_k)
    device = moe.device
    return Routing(ids.to(device), weights.to(device), width=moe.spec.router.width, num_experts=moe.spec.num_experts)


def feed_of(
    ckpt: Checkpoint,
    given: Given | None,
    *,
    layers: Sequence[int] | None,
    tokens: int | None,
    step_tokens: int,
    seed: int,
    device: torch.device,
) -> Feed:
    """The feed of a replay. `given` None: the recording beside the model. LabError for layers or experts that the model
    lacks, and where nothing is left to replay.
    """
    wants_whole("step_tokens", step_tokens, 1)
    wants_whole("seed", seed, 0, 2**63 - 1)
    if not ckpt.moe_layers:
        raise LabError(f"{ckpt.path} holds no MoE layer: there is nothing to replay.")
    assert ckpt.spec is not None
    given = Inputs(ckpt.path, ckpt.spec.d_model, 512 if tokens is None else tokens) if given is None else given
    if not isinstance(given, Given):
        raise LabTypeError(f"lab.replay takes a RoutingTrace, Activations or None, got {type(given).__name__}.")
    trace = given if isinstance(given, RoutingTrace) else None
    known = given.layers if isinstance(given, Activations | RoutingTrace) else ckpt.moe_layers
    chosen = tuple(known if layers is None else wants_wholes("layers", layers))
    _check_layers(ckpt, known, chosen)
    most = given.tokens
    count = most if tokens is None else min(wants_whole("tokens", tokens, 0), most)
    if not count or not chosen:
        raise LabError(f"lab.replay of {count} tokens in {len(chosen)} layers: there is nothing to replay.")
    if trace is not None:
        _check_experts(ckpt, trace, chosen)
        rows = _noise(chosen, count, ckpt.spec.d_model, seed)
        about = f"picks of a trace of {count} tokens, rows of noise (seed {seed})"
    else:
        assert not isinstance(given, RoutingTrace)
        rows = {n: _rows(given, n)[:count] for n in chosen}
        about = f"{count} recorded tokens" if not given.synthetic else f"{count} rows of noise"
    rows = {n: x.to(device) for n, x in rows.items()}
    return Feed(chosen, count, step_tokens, about, rows, trace)


def _rows(given: Activations | Inputs, layer: int) -> Tensor:
    return given.layer(layer)


def _noise(layers: Sequence[int], tokens: int, d_model: int, seed: int) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, d_model, generator=generator)
    return dict.fromkeys(layers, rows)  # one block for all layers: the picks are given, so the values decide nothing


def _check_layers(ckpt: Checkpoint, known: Sequence[int], chosen: Sequence[int]) -> None:
    if len(set(chosen)) < len(chosen):
        raise LabError(f"lab.replay: layers={list(chosen)} names a layer twice; a step runs each once.")
    for number in chosen:
        if number not in ckpt.moe_layers or number not in known:
            raise LabError(
                f"lab.replay: layer {number} is not in both the model (MoE layers "
                f"{', '.join(map(str, ckpt.moe_layers))}) and what was given ({', '.join(map(str, known))})."
            )


def _check_experts(ckpt: Checkpoint, trace: RoutingTrace, layers: Sequence[int]) -> None:
    for number in layers:
        width = ckpt.layer_spec(number).router.width
        if trace.width > width:
            raise LabError(
                f"lab.replay: the trace picks among R={trace.width} experts, layer {number} of {ckpt.path.name} has "
                f"R={width}."
            )
