"""A GGUF model: checked when it is opened, tensors read when they are asked for."""

import os
from collections.abc import Mapping
from typing import ClassVar

from moe_lab.checkpoint.gguf_header import read_header
from moe_lab.checkpoint.gguf_split import Part, merged_tensors, open_parts
from moe_lab.checkpoint.rawfile import RawFile, ReadCall
from moe_lab.checkpoint.scale_names import Pairing
from moe_lab.checkpoint.tensor_file import TensorFile
from moe_lab.checkpoint.tensor_info import TensorInfo


class GgufFile(TensorFile):
    """An open GGUF; any part of a split model opens all of them.

    `metadata` holds Python values (int, float, bool, str, lists), the first part's. Opening costs the headers alone.
    `file` and `header` are the first part's.
    """

    kind: ClassVar[str] = "gguf"

    def __init__(self, path: str | os.PathLike[str], *, read_call: ReadCall = os.preadv) -> None:
        given = RawFile(path, read_call)
        parts: list[Part] = []
        try:
            parts = open_parts(Part(given, read_header(given)), read_call)
            tensors = merged_tensors(parts)
        except BaseException:
            for file in (given, *(part.file for part in parts)):
                file.close()
            raise
        self.file, self.header = parts[0]
        super().__init__(
            given.path,
            [part.file for part in parts],
            [part.header.data_start for part in parts],
            tensors,
            metadata=self.header.metadata,
            pairing=Pairing({}, {}, _scaled_outside(tensors)),
        )


def _scaled_outside(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """NVFP4 weights whose global scale stands in `X.scale` -> why their blocks alone are not the weight."""
    return {
        name: f"its NVFP4 blocks stand beside {scale!r}, a scale of the whole weight, which is not applied here."
        for name, info in tensors.items()
        if info.format == "nvfp4" and (scale := name.removesuffix(".weight") + ".scale") in tensors
    }
