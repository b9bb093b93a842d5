"""Safetensors: one file, or several under an index. Checked when opened, tensors read when they are asked for."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from moe_lab.checkpoint.header_bytes import shown
from moe_lab.checkpoint.model_config import read_config, read_json_object
from moe_lab.checkpoint.places import check_name, locate
from moe_lab.checkpoint.rawfile import RawFile, ReadCall
from moe_lab.checkpoint.safetensors_header import SafetensorsHeader, read_safetensors_header
from moe_lab.checkpoint.scale_names import pair_scales
from moe_lab.checkpoint.tensor_file import TensorFile
from moe_lab.checkpoint.tensor_info import TensorInfo
from moe_lab.errors import CheckpointError

INDEX_SUFFIX = ".safetensors.index.json"


class SafetensorsFile(TensorFile):
    """An open safetensors model: `path` is one .safetensors file or an index (..safetensors.index.json).

    The config.json in the same folder comes along as `config`; `metadata` is the first part's `__metadata__`, text to
    text. A sharded model is its index: each tensor is taken from the part the index names, and a part's tensors that
    the index leaves out are there too, unless two parts have the name.
    """

    kind: ClassVar[str] = "safetensors"

    def __init__(self, path: str | os.PathLike[str], *, read_call: ReadCall = os.preadv) -> None:
        path = Path(path)
        index = read_index(path) if path.name.endswith(INDEX_SUFFIX) else None
        paths = list(locate(path, path.parent, dict.fromkeys(index.values())).items()) if index else [("", path)]
        parts: list[RawFile] = []
        try:
            for _, place in paths:
                parts.append(RawFile(place, read_call))
            headers = [read_safetensors_header(part) for part in parts]
            names = [name for name, _ in paths]
            tensors = _merged(path, index, dict(zip(names, headers, strict=True))) if index else headers[0].tensors
            config = read_config(path.parent)
            super().__init__(
                path,
                parts,
                [header.data_start for header in headers],
                tensors,
                metadata=headers[0].metadata,
                config=config,
                pairing=pair_scales(tensors, config),
            )
        except BaseException:
            for part in parts:
                part.close()
            raise


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> part name. CheckpointError before any part is touched when the index is not to be trusted."""
    weight_map: Any = read_json_object(path, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(path, "config", "the index has no weight_map of tensor names to file names.")
    if not weight_map:
        raise CheckpointError(path, "missing part", "the index names no weights at all.")
    for name in dict.fromkeys(weight_map.values()):
        check_name(path.parent, path, name)
    return weight_map


def _merged(path: Path, index: Mapping[str, str], headers: Mapping[str, SafetensorsHeader]) -> dict[str, TensorInfo]:
    for tensor, part in index.items():
        if tensor not in headers[part].tensors:
            what = f"the index says that {shown(part)} holds this tensor, but it does not."
            raise CheckpointError(path, "missing tensor", what, tensor=tensor, wanted=part)
    found = {tensor: headers[part].tensors[tensor] for tensor, part in index.items()}
    for header in headers.values():
        for tensor in header.tensors.keys() - index.keys():
            if tensor in found:
                what = "two parts have a tensor of this name and the index names neither."
                raise CheckpointError(path, "duplicate", what, tensor=tensor)
            found[tensor] = header.tensors[tensor]
    return found
