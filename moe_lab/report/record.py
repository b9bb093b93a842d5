"""What a report keeps so that it can be run again: its notebook's cells, its parameters, the numbers it showed.

The record stands in the page as JSON. No absolute path goes in: the notebook's folder is given relative to the page.
"""

import json
import os
import re
from ast import literal_eval
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_lab.errors import LabError
from moe_lab.report.numbers import Number, numbers
from moe_lab.system.environment import environment

SCHEMA = 1
MOST_NUMBERS = 5000  # 100 bytes each: half a megabyte of page
_SCRIPT = re.compile(r'<script\b[^>]*\bid="moe-lab-report"[^>]*>(.*?)</script>', re.S)
_KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def page_record(source: Path, notebook: Any, params: dict[str, Any], executed: Any, page: Path) -> dict[str, Any]:
    """The record of one run. `notebook`: as read from `source`; `executed`: with outputs; `page`: where it will be."""
    found = numbers(executed)
    return {
        "schema": SCHEMA,
        "notebook": source.name,
        "folder": _relative(source.resolve().parent, page.resolve().parent),
        "cells": [_slim(cell) for cell in notebook["cells"]],
        "parameters": {name: repr(value) for name, value in params.items()},
        "environment": environment(),
        "numbers": [asdict(number) for number in found[:MOST_NUMBERS]],
        "numbers_left_out": max(0, len(found) - MOST_NUMBERS),
    }


def page_json(record: Any) -> str:
    """The record as JSON that may stand in a script element: no text in it can end that element."""
    return json.dumps(record, ensure_ascii=False).replace("<", "\\u003c")


def read_record(page: Path) -> dict[str, Any]:
    """The record of a report. LabError when the page is missing, no finished report of ours, or a newer version's."""
    try:
        text = page.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise LabError(f"{page}: no such page.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"cannot read {page}: {error}") from error
    found = _SCRIPT.search(text)
    if found is None:
        raise LabError(
            f"{page} is no report that can be run again: it holds no record. Pages of `moe-lab report` and "
            "moe_lab.report.run do, unless a cell failed; those of nbconvert do not."
        )
    try:
        record = json.loads(found[1])
        schema = record["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"{page}: its record is damaged ({error}).") from error
    if schema != SCHEMA:
        made = record.get("environment", {}).get("moe_lab", "?") if isinstance(record, dict) else "?"
        raise LabError(f"{page} has a record of version {schema} (moe_lab {made}); this one reads version {SCHEMA}.")
    return record


def notebook_of(record: dict[str, Any], page: Path) -> tuple[Any, dict[str, Any], list[Number]]:
    """The notebook without outputs, its parameters and the numbers of the page. LabError for a damaged record."""
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_raw_cell

    make = {"code": new_code_cell, "markdown": new_markdown_cell, "raw": new_raw_cell}
    try:
        cells = []
        for cell in record["cells"]:
            made = make[cell["type"]](cell["source"], metadata={"tags": cell["tags"]} if cell["tags"] else {})
            made["id"] = cell["id"] or made["id"]
            cells.append(made)
        params = {name: literal_eval(value) for name, value in record["parameters"].items()}
        kept = [Number(**number) for number in record["numbers"]]
    except (KeyError, TypeError, ValueError, SyntaxError, AttributeError) as error:
        raise LabError(f"{page}: its record is damaged ({type(error).__name__}: {error}).") from error
    return new_notebook(cells=cells, metadata={"kernelspec": _KERNEL}), params, kept


def folder_of(record: dict[str, Any], page: Path) -> Path:
    """Where the cells run: the notebook's folder as seen from the page, or the page's own when that is gone."""
    here = page.resolve().parent
    folder = here / str(record.get("folder") or ".")
    return folder if folder.is_dir() else here


def _slim(cell: Any) -> dict[str, Any]:
    return {
        "type": cell["cell_type"],
        "source": cell["source"],
        "tags": list(cell["metadata"].get("tags", [])),
        "id": cell.get("id", ""),
    }


def _relative(folder: Path, start: Path) -> str:
    try:
        return Path(os.path.relpath(folder, start)).as_posix()
    except ValueError:  # another drive on Windows
        return ""
