"""Pieces of HTML that need nothing beyond themselves: what a notebook shows of an object, a link with its data inside.

A card is a line and a table of facts, escaped and of bounded size. Knows nothing of what is shown, loads nothing, and
reads no tensor: callers pass shapes and counts.
"""

import html
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence

MOST_TEXT = 160  # characters of one value: names come out of files, and files out of the internet
MOST_ROWS = 16

# A figure's data in a notebook's output, under its picture; here because pages are written without matplotlib.
FIGURE_MIME = "application/vnd.moe-lab.figure+json"


def card(
    title: str, facts: Mapping[str, object], *, rows: Iterable[Sequence[object]] = (), head: Sequence[str] = ()
) -> str:
    """A fragment: the title, `facts` whose value is not None or "" as a table, then `rows` under `head`, 16 at most."""
    shown = {name: value for name, value in facts.items() if value is not None and value != ""}
    body = "".join(
        f'<tr><th scope="row" style="text-align:left">{_text(n)}</th>{_cell(v)}</tr>' for n, v in shown.items()
    )
    return f"<div><b>{_text(title)}</b><table>{body}</table>{_rows(list(rows), head)}</div>"


def byte_size(count: int) -> str:
    """1536 -> "1.5 KiB"; below 1024 bytes as they are."""
    size, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, bigger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def csv_link(name: str, text: str, about: str, spec: object) -> str:
    """Links that save `text` as `name`.csv and `spec` as `name`.json, with both inside them; `about` follows in
    brackets."""
    own = json.dumps(spec, indent=1, ensure_ascii=False, default=str)
    return (
        f"{_link(name, 'csv', 'text/csv', text)} ({html.escape(about)}; {_link(name, 'json', 'application/json', own)})"
    )


def _link(name: str, suffix: str, kind: str, text: str) -> str:
    uri = f"data:{kind};charset=utf-8;base64,{b64encode(text.encode()).decode('ascii')}"
    file = f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name) or 'data'}.{suffix}"
    return f'<a download="{file}" href="{uri}">{file}</a>'


def spans(numbers: Iterable[int]) -> str:
    """Sorted numbers with runs drawn together: 0, 3 to 60."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs)


def _rows(rows: list[Sequence[object]], head: Sequence[str]) -> str:
    if not rows:
        return ""
    top = "".join(f'<th scope="col" style="text-align:left">{_text(name)}</th>' for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[:MOST_ROWS])
    more = f"<p>{len(rows) - MOST_ROWS} more</p>" if len(rows) > MOST_ROWS else ""
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>{more}"


def _cell(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
    return f'<td style="text-align:left">{_text(text)}</td>'


def _text(value: object) -> str:
    text = " ".join(str(value).split())
    return html.escape(text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…")
