"""Which file of a folder is the model, and which reader a path wants."""

import os
from pathlib import Path

from moe_lab.checkpoint.gguf import GgufFile
from moe_lab.checkpoint.gguf_split import first_parts
from moe_lab.checkpoint.header_bytes import shown
from moe_lab.checkpoint.places import place, refuse_missing
from moe_lab.checkpoint.rawfile import RawFile, ReadCall
from moe_lab.checkpoint.safetensors import INDEX_SUFFIX, SafetensorsFile
from moe_lab.checkpoint.tensor_file import TensorFile
from moe_lab.errors import CheckpointError


def open_tensor_file(path: str | os.PathLike[str], *, read_call: ReadCall = os.preadv) -> TensorFile:
    """Open a GGUF (any part of a split one stands for the whole), a .safetensors file, its index, or a folder.

    CheckpointError for what is missing, broken, hostile or of an unknown kind.
    """
    path = Path(path)
    chosen = weights_of(path) if os.path.isdir(path) else path
    if chosen.suffix == ".safetensors" or chosen.name.endswith(INDEX_SUFFIX) or _begins_like_safetensors(chosen):
        return SafetensorsFile(chosen, read_call=read_call)
    return GgufFile(chosen, read_call=read_call)


def weights_of(folder: Path) -> Path:
    """The file that stands for the folder's model. CheckpointError "missing part" when there is none or more than one.

    In this order: model.safetensors, the only index, the only .safetensors, the only GGUF (or split GGUF). "path" for
    a link that leaves the folder.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError as error:
        raise CheckpointError(folder, "unreadable", f"cannot be listed: {error.strerror or error}.") from error
    plain = [name for name in names if name.endswith(".safetensors")]
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    ggufs = first_parts(name for name in names if name.endswith(".gguf"))
    single = [name for name in plain if name == "model.safetensors"]
    for candidates in (single, indexes, plain, ggufs):
        if len(candidates) == 1:
            # None is for a folder of that name, which is for the reader to refuse.
            return place(folder, candidates[0]) or folder / candidates[0]
        if len(candidates) > 1:
            listed = ", ".join(map(shown, candidates[:4])) + (", .." if len(candidates) > 4 else "")
            what = f"an index (model{INDEX_SUFFIX}) that says which of {listed} make up the model; or open one of them"
            refuse_missing(folder, [what], "one model")
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    hint = f"; {shown(pickles[0])} is a Python pickle, which is not read" if pickles else ""
    refuse_missing(folder, [f"any .safetensors or .gguf file{hint}"], "weights")


def _begins_like_safetensors(path: Path) -> bool:
    """Whether a file of another name, a blob of a download cache for one, holds a safetensors header."""
    if path.suffix == ".gguf":
        return False
    file = RawFile(path)
    try:
        head = bytearray(min(file.size, 16))
        file.read_into(0, memoryview(head))
    finally:
        file.close()
    return head[:4] != b"GGUF" and head[8:10] in (b'{"', b"{}", b"{ ")
