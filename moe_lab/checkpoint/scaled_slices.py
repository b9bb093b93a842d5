"""Runs of bytes of experts whose scales are tensors of their own: the codes, and beside them scales and what else there
is, for each expert.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from moe_lab.checkpoint.expert_slice import Beside, ExpertSlice
from moe_lab.checkpoint.names import Stored
from moe_lab.checkpoint.plain_types import SAFETENSORS_TYPES
from moe_lab.checkpoint.tensor_file import TensorFile
from moe_lab.checkpoint.tensor_info import ScaledInfo, TensorInfo
from moe_lab.errors import CheckpointError
from moe_lab.formats import get_format
from moe_lab.formats.scaled import ScaledFormat

_FLOATS = {torch.float32, torch.bfloat16, torch.float16}


def scaled_slice(file: TensorFile, stored: Stored) -> ExpertSlice:
    """The experts of a role in a scaled format. CheckpointError "unsupported" where scales are not a table for each
    expert, "tensor type" where experts differ in format.
    """
    codec = get_format(one_format(file, stored))
    assert isinstance(codec, ScaledFormat)
    infos = [info for info in stored.infos if isinstance(info, ScaledInfo)]
    experts, rows, columns = stored.shape
    nbytes = rows * codec.row_bytes(columns)
    table = codec.scale_shape((rows, columns))
    wanted = {"scales": (table[-2], table[-1]), "biases": (table[-2], table[-1]), "global_scale": (1, 1)}
    beside = []
    for field in codec.parts_needed:
        held = [getattr(info, field) for info in infos]
        beside.append(_beside(file, stored, field, [t for t in held if t is not None], wanted[field], experts))
    data = [info.data for info in infos]
    return ExpertSlice(
        stored.name, codec.name, nbytes, (experts, rows, columns), _places(data, nbytes, experts), tuple(beside)
    )


def _beside(
    file: TensorFile, stored: Stored, field: str, held: Sequence[TensorInfo], shape: tuple[int, int], experts: int
) -> Beside:
    stored_as = SAFETENSORS_TYPES[held[0].dtype].torch
    # Exponents and e4m3 scales are bytes to the formats; fractions keep their dtype.
    dtype = stored_as if stored_as in _FLOATS else torch.uint8
    assert dtype is not None
    part = Beside(field, held[0].name, dtype, shape, ())
    one_for_all = field == "global_scale" and len(held) == 1 and held[0].nbytes == part.nbytes
    each = experts // len(held)
    for info in held:
        if info.dtype != held[0].dtype or (info.nbytes != part.nbytes * each and not one_for_all):
            raise CheckpointError(
                file.path, "unsupported",
                f"its experts cannot be streamed: {field} {info.name!r} {list(info.shape)} ({info.dtype}) are no "
                f"{list(shape)} for each expert. Open the layer without a cache.",
                tensor=stored.infos[0].name,
            )  # fmt: skip
    places = _places(held, 0 if one_for_all else part.nbytes, experts)
    name = stored.name + held[0].name.removeprefix(stored.infos[0].name) if stored.per_expert else held[0].name
    return Beside(field, name, dtype, shape, places)


def _places(held: Sequence[TensorInfo], nbytes: int, experts: int) -> tuple[tuple[Path, int], ...]:
    """A tensor for each expert, or one that holds them one after another."""
    if len(held) == experts:
        return tuple((info.file, info.offset) for info in held)
    return tuple((held[0].file, held[0].offset + e * nbytes) for e in range(experts))


def one_format(file: TensorFile, stored: Stored) -> str:
    """The format of all the role's tensors. CheckpointError "tensor type" where they differ: they make no stack."""
    format, *others = stored.formats
    if others:
        raise CheckpointError(
            file.path, "tensor type",
            f"experts of one layer come in several formats ({', '.join(stored.formats)}); wanted one.",
            tensor=stored.name,
        )  # fmt: skip
    return format
