"""Where each expert's gate, up and down stand in a file, as runs of bytes: what streaming and resident layers read.

Half of a fused tensor's rows is a run of its own; rows that alternate and swapped axes are not. Scales in tensors of
their own are runs beside the codes' (`scaled_slices`).
"""

from collections.abc import Mapping

from moe_lab.checkpoint.expert_slice import ExpertSlice
from moe_lab.checkpoint.names import Stored
from moe_lab.checkpoint.scaled_slices import one_format, scaled_slice
from moe_lab.checkpoint.tensor_file import TensorFile
from moe_lab.checkpoint.tensor_info import TensorInfo
from moe_lab.errors import CheckpointError
from moe_lab.families import TensorNames
from moe_lab.formats import FORMATS, get_format

ROUTED = ("gate", "up", "down")


def expert_slices(file: TensorFile, names: TensorNames, tensors: Mapping[str, Stored]) -> list[ExpertSlice]:
    """gate, up and down. CheckpointError "unsupported" for experts without a gate or a layout that is no runs of bytes,
    "tensor type" for a format that no layer computes with.
    """
    if not {"gate", "gate_up"} & set(tensors):
        what = "its experts cannot be streamed: they have no gate. Open the layer without a cache."
        raise CheckpointError(file.path, "unsupported", what, tensor=tensors["up"].infos[0].name)
    return [part for role in ROUTED if (part := expert_slice(file, names, tensors, role)) is not None]


def expert_slice(file: TensorFile, names: TensorNames, tensors: Mapping[str, Stored], role: str) -> ExpertSlice | None:
    """One of them, None where the layer has no such part. Errors as `expert_slices`."""
    fused = role != "down" and "gate_up" in tensors
    stored = tensors.get("gate_up" if fused else role)
    if stored is None:
        return None
    why = why_not_runs(names, stored, fused)
    if why is not None:
        raise CheckpointError(
            file.path, "unsupported", f"its experts cannot be streamed: {why}. Open the layer without a cache.",
            tensor=stored.infos[0].name,
        )  # fmt: skip
    if stored.scaled:
        return scaled_slice(file, stored)
    return _runs(file, stored, second=fused and role == "up", halves=2 if fused else 1)


def why_not_runs(names: TensorNames, stored: Stored, fused: bool) -> str | None:
    """Why an expert of this tensor is no single run of bytes; None when it is."""
    if stored.scaled:
        return "gate and up share a tensor whose scales stand in another" if fused else None
    if names.transposed:
        return "its last two axes are swapped, and an expert's rows are columns there"
    if fused and names.interleaved:
        return "rows of gate and up alternate"
    return None


def _runs(file: TensorFile, stored: Stored, *, second: bool, halves: int) -> ExpertSlice:
    for info in stored.infos:
        check_format(file, info)
    format = one_format(file, stored)
    experts, rows, columns = stored.shape
    codec = get_format(format)
    if columns % codec.block:
        # The tensor has whole blocks, but not its rows.
        raise CheckpointError(
            file.path, "row length",
            f"rows of {columns} values are no whole blocks of {codec.block}, which {codec.name} is made of.",
            tensor=stored.infos[0].name, seen=columns, wanted=codec.block,
        )  # fmt: skip
    nbytes = rows // halves * codec.row_bytes(columns)
    skip = nbytes if second else 0
    infos = [info for info in stored.infos if isinstance(info, TensorInfo)]
    if stored.per_expert:
        places = tuple((info.file, info.offset + skip) for info in infos)
    else:
        (info,) = infos
        places = tuple((info.file, info.offset + e * halves * nbytes + skip) for e in range(experts))
    return ExpertSlice(stored.name, codec.name, nbytes, (experts, rows // halves, columns), places)


def check_format(file: TensorFile, info: TensorInfo | object) -> None:
    """CheckpointError "tensor type" unless layers compute with the tensor's format."""
    if isinstance(info, TensorInfo):
        file.check_complete(info.name)
    if not isinstance(info, TensorInfo) or info.format in FORMATS:
        return
    known = ", ".join(FORMATS)
    number = "" if info.ggml_type is None else f"{info.ggml_type} "
    raise CheckpointError(
        file.path,
        "tensor type",
        f"no layer computes with tensor type {number}({info.format or 'unknown'}); wanted: {known}.",
        tensor=info.name,
        seen=info.dtype if info.ggml_type is None else info.ggml_type,
        wanted=known,
    )
