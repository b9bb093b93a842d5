"""From one MoE layer's output to the rows that the next one reads: residual, norms and attention of a GGUF model.

For models whose layers are: h += attention(norm(h)); x = norm(h); h += MoE(x), with grouped-query attention, rotary
positions on halves, optional biases and optional norms of q and k (`KINDS`). fp32 throughout, weights decoded, causal
within each text. On the shipped model its rows equal the recorded ones, but for the fp16 that they are kept in.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from moe_lab._types import Float, Int, Tensor
from moe_lab.activations import Inputs
from moe_lab.block import rms_norm
from moe_lab.errors import LabError
from moe_lab.formats import QuantTensor
from moe_lab.open import Checkpoint

KINDS = ("qwen2moe", "qwen3moe", "olmoe")
Texts = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Between:
    """`residual` [T, D]: h as layer `number` found it. Called with that layer's output it gives the next layer's rows.

    `texts`: (start, stop) of each text among the T tokens; a text's positions count from 0.
    """

    ckpt: Checkpoint
    number: int
    residual: Tensor
    texts: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> Float[Tensor, "T D"]:
        """x [T, D] of layer `number`."""
        return _normed(self.ckpt, f"blk.{self.number}.ffn_norm.weight", self.residual)

    def __call__(self, out: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """x [T, D] of the next layer."""
        h = attended(self.ckpt, self.number + 1, self.residual + out.float(), self.texts)
        return _normed(self.ckpt, f"blk.{self.number + 1}.ffn_norm.weight", h)


def walk(ckpt: Checkpoint, token_ids: Int[Tensor, " T"], texts: Texts) -> Iterator[Between]:
    """The model on the tokens, layer after layer, each as it stands before its experts; MoE layers by arm reference.

    LabError for a model of another kind, texts that do not cover the tokens, ids outside the vocabulary.
    """
    if ckpt.architecture not in KINDS:
        raise LabError(
            f"{ckpt.path} is of architecture {ckpt.architecture!r}; what lies between its layers is known for "
            f"{', '.join(KINDS)}. Give lab.compare a NextLayer with a carry of your own."
        )
    spans = tuple((int(a), int(b)) for a, b in texts)
    if [t for a, b in spans for t in range(a, b)] != list(range(len(token_ids))):
        raise LabError(f"texts {list(spans)} do not follow each other from 0 to T = {len(token_ids)}.")
    table = _read(ckpt, "token_embd.weight")
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < len(table):
        raise LabError(f"token ids reach from {int(token_ids.min())} to {int(token_ids.max())}; V is {len(table)}.")
    h = table[token_ids.long()]
    for number in range(max(ckpt.moe_layers) + 1):
        here = Between(ckpt, number, attended(ckpt, number, h, spans), spans)
        yield here
        h = here.residual + ckpt.layer(number)(here.rows, "reference").out


def between(ckpt: Checkpoint, number: int, token_ids: Int[Tensor, " T"], texts: Texts) -> Between:
    """`walk` up to layer `number`. LabError where the model has no such layer."""
    for here in walk(ckpt, token_ids, texts):
        if here.number == number:
            return here
    raise LabError(f"{ckpt.path} has no MoE layer {number}; it has {', '.join(map(str, ckpt.moe_layers))}.")


class Tokens(NamedTuple):
    """Token ids int64 [T] and where texts begin and end among them."""

    ids: Tensor
    texts: tuple[tuple[int, int], ...]


def tokens_of(ckpt: Checkpoint, inputs: Inputs, most: int | None = None) -> Tokens | None:
    """The recorded token ids (at most `most`) to run the model on, each run of one domain a text of its own from its
    first position on (so rows are not those recorded, which had what stood before). None for synthetic rows, rows
    without ids, and models whose layers are not all MoE layers of a known kind.
    """
    recorded = inputs.recorded
    whole = list(ckpt.moe_layers) == list(range(len(ckpt.moe_layers)))
    if recorded is None or recorded.token_ids is None or ckpt.architecture not in KINDS or not whole:
        return None
    tokens = min(inputs.tokens, recorded.tokens, *([] if most is None else [most]))
    names = [""] * tokens if recorded.domains is None else [str(d) for d in recorded.domains[:tokens]]
    starts = [t for t in range(tokens) if t == 0 or names[t] != names[t - 1]]
    ids = torch.from_numpy(recorded.token_ids[:tokens].astype("int64"))
    return Tokens(ids, tuple(zip(starts, [*starts[1:], tokens], strict=True)))


def attended(ckpt: Checkpoint, layer: int, h: Float[Tensor, "T D"], texts: Texts) -> Float[Tensor, "T D"]:
    """h + attention(norm(h)) of one layer."""
    at = f"blk.{layer}."
    normed = _normed(ckpt, at + "attn_norm.weight", h)
    heads, shared = (int(_meta(ckpt, f"attention.head_count{kv}")) for kv in ("", "_kv"))
    q, k, v = (_linear(ckpt, f"{at}attn_{name}", normed) for name in "qkv")
    q, k, v = (t.unflatten(-1, (n, -1)) for t, n in ((q, heads), (k, shared), (v, shared)))
    q, k = (_head_normed(ckpt, f"{at}attn_{name}_norm.weight", t) for name, t in (("q", q), ("k", k)))
    parts = []
    for start, stop in texts:
        own = [_rotated(ckpt, t[start:stop]).transpose(0, 1) for t in (q, k)]
        own = [t.repeat_interleave(heads // t.shape[0], 0) for t in (*own, v[start:stop].transpose(0, 1))]
        parts.append(scaled_dot_product_attention(own[0], own[1], own[2], is_causal=True).transpose(0, 1).flatten(1))
    return h + _linear(ckpt, at + "attn_output", torch.cat(parts))


def _rotated(ckpt: Checkpoint, t: Tensor) -> Tensor:
    """Rotary positions 0, 1, .. on [tokens, heads, width]: value i turns with value i + width / 2."""
    half = t.shape[-1] // 2
    base = float(_meta(ckpt, "rope.freq_base", 10000.0))
    angle = torch.arange(len(t)).double()[:, None] * base ** (-torch.arange(half).double() / half)
    cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
    low, high = t[..., :half], t[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def _linear(ckpt: Checkpoint, name: str, x: Tensor) -> Tensor:
    product = x @ _read(ckpt, f"{name}.weight").T
    return product + _read(ckpt, f"{name}.bias") if f"{name}.bias" in ckpt.tensors else product


def _normed(ckpt: Checkpoint, name: str, h: Tensor) -> Tensor:
    return rms_norm(h, _read(ckpt, name), float(_meta(ckpt, "attention.layer_norm_rms_epsilon", 1e-6)))


def _head_normed(ckpt: Checkpoint, name: str, t: Tensor) -> Tensor:
    if name not in ckpt.tensors:
        return t
    weight = _read(ckpt, name)  # of one head, or of all heads together
    return _normed(ckpt, name, t if weight.numel() == t.shape[-1] else t.flatten(1)).view(t.shape)


def _read(ckpt: Checkpoint, name: str) -> Tensor:
    if name not in ckpt.tensors:
        raise LabError(f"{ckpt.path} has no tensor {name}, which lies between its MoE layers.")
    t = ckpt.read(name)
    return t.dequantize() if isinstance(t, QuantTensor) else t.float()


def _meta(ckpt: Checkpoint, key: str, default: Any = None) -> Any:
    full = f"{ckpt.architecture}.{key}"
    found = ckpt.metadata.get(full, default)
    if found is None:
        raise LabError(f"{ckpt.path} has no metadata {full}, which its attention needs.")
    return found
