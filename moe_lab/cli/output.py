"""What a command prints: a table for people, or with --json one object for programs."""

import json
import math
from collections.abc import Sequence
from typing import Any

from moe_lab.system.environment import environment


def emit(
    command: str,
    rows: Sequence[dict[str, Any]],
    *,
    as_json: bool,
    ok: bool = True,
    title: str = "",
    notes: Sequence[str] = (),
) -> None:
    """Print `rows`. JSON: {command, ok, device, backend, rows}; numbers that are not finite become null."""
    if as_json:
        env = environment()
        clean = [{k: _plain(v) for k, v in row.items()} for row in rows]
        print(
            json.dumps(
                {"command": command, "ok": ok, "device": env["device"], "backend": env["backend"], "rows": clean}
            )
        )
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    plain: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}  # a path may hold [brackets]
    console = Console(width=None if Console().is_terminal else 160, **plain)
    if rows:
        table = Table(
            title=Text(title) if title else None,
            title_justify="left",
            pad_edge=False,
            padding=(0, 0, 0, 1),
            box=box.SIMPLE_HEAD,
        )
        for name in rows[0]:
            table.add_column(
                name.replace("_", " "), justify="left" if isinstance(rows[0][name], str) else "right", overflow="fold"
            )
        for row in rows:
            table.add_row(*(_text(v) for v in row.values()))
        console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
