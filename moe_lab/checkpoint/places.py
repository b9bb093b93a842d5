"""Where the parts of a model may stand: in its folder, and where the links of a download cache point.

Names come out of untrusted index files. A name is a plain relative path below the folder. A link inside the folder may
lead elsewhere in the folder or, in a download cache (`<model>/snapshots/<revision>`), to `<model>/blobs`; one that
leads anywhere else is refused by name, because an archive can carry links too.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NoReturn

from moe_lab.checkpoint.header_bytes import shown
from moe_lab.errors import CheckpointError

_MAX_LINK_BYTES = 1024


def check_name(folder: Path, source: Path, name: str) -> None:
    """CheckpointError "path", blamed on `source`, when `name` is no plain relative path below `folder`."""
    path = PurePosixPath(name)
    plain = path.parts and not path.is_absolute() and ".." not in path.parts and not any(c in name for c in "\\:")
    # "./x" and "x" would be two names of one file; what does not print has no place in a path or a message.
    if not plain or str(path) != name or not name.isprintable():
        raise CheckpointError(
            source,
            "path",
            f"names the file {shown(name)}, which is no plain path below {str(folder)!r}; nothing outside is read.",
            seen=name,
            wanted="a path below the folder",
        )


def place(folder: Path, name: str) -> Path | None:
    """The path to open for part `name` of `folder`, or None when it is no regular file. CheckpointError "path" for a
    link that leaves the folder for anywhere but its cache's blobs.
    """
    path = folder / name
    written = _written_link(path)
    target = Path(os.path.realpath(path.parent / written if written else path))
    if not _allowed(Path(os.path.realpath(folder)), target):
        _refuse_link(path, written or _link_text(path))
    if not os.path.isfile(target):
        return None
    return target if written else path


def locate(
    source: Path, folder: Path, names: Iterable[str], *, what: str = "the model is incomplete"
) -> dict[str, Path]:
    """Part name -> path to open. CheckpointError "missing part" listing the names that are no files; none is read."""
    found = {name: place(folder, name) for name in names}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        refuse_missing(source, [name + _what_is_there(folder / name) for name in missing], f"{len(found)} parts", what)
    return {name: path for name, path in found.items() if path is not None}


def refuse_missing(source: Path, missing: list[str], wanted: str, what: str = "the model is incomplete") -> NoReturn:
    """CheckpointError "missing part" with the first few names."""
    listed = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    raise CheckpointError(source, "missing part", f"{what}; missing: {listed}.", seen=listed, wanted=wanted)


def _allowed(folder: Path, target: Path) -> bool:
    if target.is_relative_to(folder):
        return True
    caches = [parent.parent / "blobs" for parent in (folder, *folder.parents) if parent.name == "snapshots"]
    return any(target.parent == blobs for blobs in caches)


def _written_link(path: Path) -> str | None:
    """The target of a link that was written out as a file's text, which is how copying without links leaves it."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= _MAX_LINK_BYTES:
            return None
        text = path.read_bytes()
    except OSError:
        return None
    if not text.startswith(b"../") or any(c < 32 for c in text):
        return None
    return os.fsdecode(text)


def _link_text(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return os.path.realpath(path)


def _refuse_link(path: Path, link: str) -> NoReturn:
    raise CheckpointError(
        path,
        "path",
        f"is a link to {shown(link)}, outside its folder; such links are followed only to the blobs of a download "
        "cache. Put the file itself there, or open the folder that holds it.",
        seen=link,
        wanted="a file in the folder",
    )


def _what_is_there(path: Path) -> str:
    if os.path.isdir(path):
        return " (a folder has the name)"
    return " (a link to nothing)" if os.path.islink(path) else ""
