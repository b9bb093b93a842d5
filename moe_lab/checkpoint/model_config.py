"""config.json beside the weights: read without trust, as plain data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_lab.checkpoint.places import place
from moe_lab.checkpoint.rawfile import RawFile
from moe_lab.checkpoint.strict_json import BadJson, parse_json
from moe_lab.errors import CheckpointError

MAX_BYTES = 24 << 20  # an index of 94,000 tensors, 61 layers of 256 experts with scales, takes some 11 MB

# What the makers of models call the number of experts, of experts a token takes, and of experts that only hand x on.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TAKEN = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "top_k_experts",
)  # fmt: skip
_ZERO_EXPERTS = ("zero_expert_num",)
MAX_EXPERTS = 65_535  # ids are 16-bit in traces; and each expert of a checkpoint is a name to look for


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """A small JSON file holding one object. CheckpointError "config" when it is anything else."""
    file = RawFile(path)
    try:
        if file.size > MAX_BYTES:
            raise CheckpointError(path, "config", f"{what} has {file.size} bytes; at most {MAX_BYTES} are read.")
        data = bytearray(file.size)
        file.read_into(0, memoryview(data))
    finally:
        file.close()
    try:
        value = parse_json(bytes(data))
    except BadJson as error:
        raise CheckpointError(path, "config", f"{what} {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(path, "config", f"{what} is a {type(value).__name__}; wanted a JSON object.")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json, {} when it has none. CheckpointError "model shape" for more experts than ids can name,
    or when a token takes more experts than there are, which no family allows.
    """
    path = place(folder, "config.json")
    if path is None:
        return {}
    config = read_json_object(path, "config.json")
    nested = config.get("text_config")
    for settings in (config, nested) if isinstance(nested, Mapping) else (config,):
        _check_counts(path, settings)
    return config


def _check_counts(path: Path, config: Mapping[str, Any]) -> None:
    experts, taken = _first(config, _EXPERTS), _first(config, _TAKEN)
    if experts is not None and experts[1] > MAX_EXPERTS:
        what = f"{experts[0]} is {experts[1]}; at most {MAX_EXPERTS} experts are possible."
        raise CheckpointError(path, "model shape", what, seen=experts[1], wanted=f"at most {MAX_EXPERTS}")
    if experts is None or taken is None:
        return
    zero = _first(config, _ZERO_EXPERTS)
    width = experts[1] + (zero[1] if zero else 0)
    if taken[1] > width:
        raise CheckpointError(
            path,
            "model shape",
            f"{taken[0]} is {taken[1]}, more than the {width} experts of {experts[0]}.",
            seen=taken[1],
            wanted=f"at most {width}",
        )


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, int] | None:
    return next(((name, config[name]) for name in names if type(config.get(name)) is int), None)
