"""Where the lab keeps what it measured about a machine: small JSON files, safe to delete at any time."""

import json
import os
import re
from pathlib import Path
from typing import Any

from moe_lab.errors import LabError
from moe_lab.system.files import replace_file

CACHE_VARIABLE = "MOE_LAB_CACHE"


def cache_folder() -> Path:
    """The folder that MOE_LAB_CACHE names, else `moe-lab` in the user's cache folder (XDG_CACHE_HOME, ~/.cache)."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moe-lab"


def slug(*names: str) -> str:
    """Names as one file name: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(names).lower()).strip("-")


def write_json(path: Path, value: Any) -> Path:
    """Write a value as indented JSON in one step, folders made. LabError naming the file when that fails."""
    text = json.dumps(value, indent=1, sort_keys=True) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise LabError(
            f"cannot make the folder {path.parent}: {e.strerror or e}. {CACHE_VARIABLE} names another."
        ) from e
    return replace_file(path, lambda part: part.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> Any:
    """The value of a JSON file, None when there is no such file. LabError naming a file that is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as e:
        raise LabError(f"cannot read {path}: {e}. It may be deleted: it will be measured again.") from e
