"""What a checkpoint holds, as a table: a row for each MoE layer, and a summary of the whole.

Bits a weight are shown twice: `bits_nominal` is what the file's own label (`general.file_type`) promises, `bits_actual`
what its expert tensors take, scales included. They differ more often than one thinks: rows that are no multiple of 256
values fall back to larger types under the same label.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moe_lab.checkpoint.ggml_types import FILE_TYPES, GGML_BY_NAME
from moe_lab.checkpoint.names import Stored
from moe_lab.errors import LabError, MissingExtra
from moe_lab.open import Checkpoint
from moe_lab.spec import MoESpec
from moe_lab.stream.sizing import check_size
from moe_lab.stream.source import ExpertSource

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("gate", "up", "down")
COLUMNS = (
    "layer", "family", "experts", "top_k", "router", "activation", "shared",
    "format_gate", "format_up", "format_down", "format_shared",
    "bytes_per_expert", "bytes_shared", "bytes_per_layer", "active_bytes_per_token", "bits_nominal", "bits_actual",
)  # fmt: skip


def inspect_checkpoint(ckpt: Checkpoint) -> "pd.DataFrame":
    """One row a MoE layer (columns: COLUMNS); no rows for a file without MoE layers. Reads the header alone.

    `bytes_per_layer` counts router, experts and shared expert; `active_bytes_per_token` what one token touches of them:
    K experts and the rest, a hash table's row aside. `shared` is the shared expert's form, None without one. A format
    "a/b": experts of one layer differ. Bits are NaN where the file has no label, and sizes where a tensor's type is
    unknown.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtra("pandas", "lab", "the table of layers") from error
    return pd.DataFrame([_row(ckpt, layer) for layer in ckpt.moe_layers], columns=list(COLUMNS))


def summary(ckpt: Checkpoint, gib: float | None = None) -> dict[str, Any]:
    """The whole file in plain values: family, sizes, and for a memory of `gib` GiB how many expert slots fit into it.

    `slots` counts slots as the expert cache lays them out (parts padded to 256 bytes, the widest layer's size for all).
    `streaming` says why the experts cannot be streamed, where that is so; there are no slots then.
    """
    spec = ckpt.spec
    out: dict[str, Any] = {
        "path": str(ckpt.path), "file_bytes": ckpt.size, "tensors": len(ckpt.tensors), "model_hash": ckpt.model_hash,
        "architecture": ckpt.architecture, "family": spec.family if spec else None,
        "moe_layers": len(ckpt.moe_layers),
    }  # fmt: skip
    if gib is not None:
        check_size(None, gib)
    if spec is None:
        return out
    source, why = _source(ckpt)
    out |= {
        "experts": spec.num_experts, "top_k": spec.top_k, "d_model": spec.d_model, "d_expert": spec.d_expert,
        "activation": spec.activation, "shared_expert": _shared_text(spec), "router": _router_text(spec),
        "expert_bytes": sum(_expert_bytes(ckpt.layer_tensors(i)) for i in ckpt.moe_layers),
        "slot_bytes": source.slot_bytes if source else None, "streaming": why or "possible",
        "total_experts": sum(ckpt.layer_spec(i).num_experts for i in ckpt.moe_layers),
    }  # fmt: skip
    if gib is not None:
        out |= memory(ckpt, [gib])[0]
    return out


def memory(ckpt: Checkpoint, gibs: Sequence[float]) -> list[dict[str, Any]]:
    """For each size in GiB: expert slots that fit into it and the share of the model's experts, both None where the
    experts cannot be streamed. LabError for a size that cannot be.
    """
    source = _source(ckpt)[0] if ckpt.spec else None
    rows = []
    for gib in gibs:
        check_size(None, gib)
        slots = int(gib * 2**30 // source.slot_bytes) if source else None
        share = min(1.0, slots / source.total_experts) if source and slots is not None else None
        rows.append({"gib": gib, "slots": slots, "share_of_experts": share})
    return rows


def _source(ckpt: Checkpoint) -> tuple[ExpertSource | None, str | None]:
    """The experts as a cache would read them, or why it cannot."""
    try:
        return ckpt.expert_source, None
    except LabError as error:
        return None, str(error)


def _row(ckpt: Checkpoint, layer: int) -> dict[str, Any]:
    spec, tensors = ckpt.layer_spec(layer), ckpt.layer_tensors(layer)
    experts, shared = _expert_bytes(tensors), _sum(tensors, "shared")
    table = _sum(tensors, "hash_table")
    around = sum(stored.nbytes for stored in tensors.values()) - experts - shared - table
    per_expert = experts // spec.num_experts  # NaN stays NaN
    values = (3 if spec.gated else 2) * spec.num_experts * spec.d_expert * spec.d_routed
    weights = sum(tensors[role].nbytes for role in ("gate", "up", "gate_up", "down") if role in tensors)
    return {
        "layer": layer, "family": spec.family, "experts": spec.num_experts, "top_k": spec.top_k,
        "router": _router_text(spec), "activation": spec.activation, "shared": _shared_text(spec),
        **{f"format_{part}": _format(tensors, part) for part in PARTS},
        "format_shared": _shared_format(tensors) if spec.shared else None,
        "bytes_per_expert": per_expert, "bytes_shared": shared, "bytes_per_layer": around + experts + shared + table,
        "active_bytes_per_token": around + spec.top_k * per_expert + shared,
        "bits_nominal": _nominal_bits(ckpt), "bits_actual": 8 * weights / values,
    }  # fmt: skip


def _expert_bytes(tensors: Mapping[str, Stored]) -> float:
    """Weights and biases of all routed experts."""
    roles = {f"{part}{suffix}" for part in (*PARTS, "gate_up") for suffix in ("", "_bias")}
    return sum(stored.nbytes for role, stored in tensors.items() if role in roles)


def _sum(tensors: Mapping[str, Stored], prefix: str) -> float:
    return sum(stored.nbytes for role, stored in tensors.items() if role.startswith(prefix))


def _format(tensors: Mapping[str, Stored], part: str) -> str | None:
    stored = tensors.get(part) or (tensors.get("gate_up") if part != "down" else None)
    return None if stored is None else "/".join(stored.formats)


def _shared_format(tensors: Mapping[str, Stored]) -> str:
    roles = ("shared_gate", "shared_up", "shared_gate_up", "shared_down")
    return "/".join(dict.fromkeys(f for role in roles if role in tensors for f in tensors[role].formats))


def _nominal_bits(ckpt: Checkpoint) -> float:
    name = FILE_TYPES.get(ckpt.metadata.get("general.file_type", -1))
    return math.nan if name is None else 8 * GGML_BY_NAME[name].block_bytes / GGML_BY_NAME[name].block


def _router_text(spec: MoESpec) -> str:
    router = spec.router
    score = router.weights_from if router.score == "none" else router.score
    parts = [score, f"top-{router.top_k} of {router.width}"]
    parts += ["by a hash table"] if router.hash_routing else []
    parts += ["with a correction bias"] if spec.correction_bias else []
    parts += [f"best {router.topk_group} of {router.n_group} groups"] if router.n_group > 1 else []
    parts += ["normalised"] if router.normalize else []
    parts += [f"scale {router.scale:g}"] if router.scale != 1 else []
    return ", ".join(parts)


def _shared_text(spec: MoESpec) -> str | None:
    shared = spec.shared
    return None if shared is None else f"width {shared.d_expert}{', gated' if shared.gated else ''}"
