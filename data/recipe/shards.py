"""A model as several small safetensors files with a manifest of hashes: written on one machine, joined on another.

The manifest (`shards.json`) names every file with its sha256 and size in bytes. Joining checks all of it.
"""

import hashlib
import json
from pathlib import Path

from torch import Tensor

MANIFEST = "shards.json"


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def split(state: dict[str, Tensor], limit_bytes: int) -> list[dict[str, Tensor]]:
    """Tensors, in order of their names, in parts of at most `limit_bytes`. ValueError for a tensor above it."""
    parts: list[dict[str, Tensor]] = [{}]
    room = limit_bytes
    for name in sorted(state):
        size = state[name].nbytes
        if size > limit_bytes:
            raise ValueError(f"{name} has {size} bytes, above the limit of {limit_bytes} for one shard")
        if size > room:
            parts.append({})
            room = limit_bytes
        parts[-1][name] = state[name]
        room -= size
    return parts


def save(state: dict[str, Tensor], folder: Path, limit_bytes: int = 14_500_000) -> list[Path]:
    """Write the shards and the manifest into `folder`; the paths of the shards, in order."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    parts = split(state, limit_bytes)
    paths = []
    for number, part in enumerate(parts, start=1):
        path = folder / f"lab-42m-{number:02d}-of-{len(parts):02d}.safetensors"
        save_file(part, path)
        paths.append(path)
    manifest = [{"file": path.name, "sha256": sha256(path), "nbytes": path.stat().st_size} for path in paths]
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return paths


def join(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder of shards. ValueError naming the first file missing or unlike the manifest."""
    from safetensors.torch import load_file

    state: dict[str, Tensor] = {}
    for entry in json.loads((folder / MANIFEST).read_text()):
        path = folder / entry["file"]
        if not path.is_file():
            raise ValueError(f"{path}: shard missing")
        if (seen := sha256(path)) != entry["sha256"]:
            raise ValueError(f"{path}: sha256 {seen}, manifest says {entry['sha256']}")
        state |= load_file(path)
    return state
