"""Keep notebooks/*.ipynb free of what a run leaves behind: outputs, execution counts, widget state, odd kernel names.

`python tools/strip_notebooks.py [FILE...]` rewrites; `--check` changes nothing and exits 1 naming each unclean file.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def stripped(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook as it belongs in the repository: sources, tags and stable cell ids only."""
    cells = []
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"]).splitlines(keepends=True)  # text or list of lines: both occur
        kept = {"cell_type": cell["cell_type"], "id": f"cell-{number:02d}", "metadata": {}, "source": source}
        if tags := cell["metadata"].get("tags"):
            kept["metadata"] = {"tags": tags}
        if cell["cell_type"] == "code":
            kept |= {"execution_count": None, "outputs": []}
        cells.append(kept)
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="notebooks (default: all in notebooks/)")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a file is not clean")
    options = parser.parse_args()
    unclean = 0
    for path in options.files or sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = path.read_text()
        clean = json.dumps(stripped(json.loads(text)), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        if clean == text:
            continue
        unclean += 1
        if options.check:
            print(f"{path} is not clean: run `python tools/strip_notebooks.py`.", file=sys.stderr)
        else:
            path.write_text(clean)
            print(f"stripped {path}")
    return int(options.check and unclean > 0)


if __name__ == "__main__":
    sys.exit(main())
