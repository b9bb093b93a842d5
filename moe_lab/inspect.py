"""What a checkpoint holds, as a table: a row for each MoE layer, and a summary of the whole.

Bits a weight are shown twice: `bits_nominal` is what the file's own label (`general.file_type`) promises, `bits_actual`
what its expert tensors take. They differ more often than one thinks: rows that are no multiple of 256 values fall back
to larger types under the same label.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moe_lab.checkpoint.ggml_types import FILE_TYPES, GGML_BY_NAME
from moe_lab.checkpoint.gguf_header import TensorInfo
from moe_lab.errors import MissingExtra
from moe_lab.open import Checkpoint
from moe_lab.stream.sizing import check_size

if TYPE_CHECKING:
    import pandas as pd

ROUTED = ("gate", "up", "down")
COLUMNS = (
    "layer", "experts", "top_k", "router", "format_gate", "format_up", "format_down", "format_shared",
    "bytes_per_expert", "bytes_shared", "bytes_per_layer", "active_bytes_per_token", "bits_nominal", "bits_actual",
)  # fmt: skip


def inspect_checkpoint(ckpt: Checkpoint) -> "pd.DataFrame":
    """One row a MoE layer (columns: COLUMNS); no rows for a file without MoE layers. Reads the header alone.

    `bytes_per_layer` counts router, experts and shared expert; `active_bytes_per_token` what one token touches of them:
    K experts and the rest. Bits are NaN where the file has no label, and sizes where a tensor's type is unknown.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtra("pandas", "lab", "the table of layers") from error
    return pd.DataFrame([_row(ckpt, layer) for layer in ckpt.moe_layers], columns=list(COLUMNS))


def summary(ckpt: Checkpoint, gib: float | None = None) -> dict[str, Any]:
    """The whole file in plain values: family, sizes, and for a memory of `gib` GiB how many expert slots fit into it.

    `slots` counts slots as the expert cache lays them out (parts padded to 256 bytes, the widest layer's size for all).
    """
    if gib is not None:
        check_size(None, gib)
    spec = ckpt.spec
    out: dict[str, Any] = {
        "path": str(ckpt.path), "file_bytes": ckpt.size, "tensors": len(ckpt.tensors), "model_hash": ckpt.model_hash,
        "architecture": ckpt.metadata.get("general.architecture"), "family": spec.family if spec else None,
        "moe_layers": len(ckpt.moe_layers),
    }  # fmt: skip
    if spec is None:
        return out
    source = ckpt.expert_source
    out |= {
        "experts": spec.num_experts, "top_k": spec.top_k, "d_model": spec.d_model, "d_expert": spec.d_expert,
        "activation": spec.activation, "shared_expert": _shared_text(ckpt), "router": _router_text(ckpt),
        "expert_bytes": sum(source.expert_nbytes(i) * source.num_experts(i) for i in source.layers),
        "slot_bytes": source.slot_bytes, "total_experts": source.total_experts,
    }  # fmt: skip
    if gib is not None:
        slots = int(gib * 2**30 // source.slot_bytes)
        out |= {"gib": gib, "slots": slots, "share_of_experts": min(1.0, slots / source.total_experts)}
    return out


def _row(ckpt: Checkpoint, layer: int) -> dict[str, Any]:
    spec = ckpt.spec
    assert spec is not None
    tensors = ckpt.layer_tensors(layer)
    experts = sum(_nbytes(tensors[role]) for role in ROUTED)
    shared = sum(_nbytes(t) for role, t in tensors.items() if role.startswith("shared"))
    router = _nbytes(tensors["router"])
    values = sum(math.prod(tensors[role].shape) for role in ROUTED)
    per_expert = experts // spec.num_experts  # NaN stays NaN
    return {
        "layer": layer, "experts": spec.num_experts, "top_k": spec.top_k, "router": _router_text(ckpt),
        **{f"format_{role}": _format(tensors[role]) for role in ROUTED},
        "format_shared": _shared_format(tensors) if spec.shared else None,
        "bytes_per_expert": per_expert, "bytes_shared": shared, "bytes_per_layer": router + experts + shared,
        "active_bytes_per_token": router + spec.top_k * per_expert + shared,
        "bits_nominal": _nominal_bits(ckpt), "bits_actual": 8 * experts / values,
    }  # fmt: skip


def _nbytes(tensor: TensorInfo) -> float:
    return math.nan if tensor.nbytes is None else tensor.nbytes


def _format(tensor: TensorInfo) -> str:
    return tensor.format or f"type {tensor.ggml_type}"


def _shared_format(tensors: Mapping[str, TensorInfo]) -> str:
    return "/".join(dict.fromkeys(_format(tensors[f"shared_{role}"]) for role in ROUTED))


def _nominal_bits(ckpt: Checkpoint) -> float:
    name = FILE_TYPES.get(ckpt.metadata.get("general.file_type", -1))
    return math.nan if name is None else 8 * GGML_BY_NAME[name].block_bytes / GGML_BY_NAME[name].block


def _router_text(ckpt: Checkpoint) -> str:
    assert ckpt.spec is not None
    router = ckpt.spec.router
    parts = [router.score, f"top-{router.top_k} of {router.width}"]
    parts += ["normalised"] if router.normalize else []
    parts += [f"scale {router.scale:g}"] if router.scale != 1 else []
    return ", ".join(parts)


def _shared_text(ckpt: Checkpoint) -> str | None:
    shared = ckpt.spec.shared if ckpt.spec else None
    return None if shared is None else f"width {shared.d_expert}{', gated' if shared.gated else ''}"
