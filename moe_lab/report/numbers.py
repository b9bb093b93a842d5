"""The numbers a notebook's outputs show, each under a key that a second run gives it again.

Read from tables (HTML, or printed by pandas) and from printed lines, as shown: so with the digits shown, and no more.
A number's key is its cell, its table, and the words that stand beside and above it; never its place on the page alone,
so that a table in another order is still the same table.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from moe_lab.report.execute import titles

_NUMBER = r"[-+−]?(?:\d{1,3}(?:[,\u00a0\u202f ]\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
_VALUE = re.compile(rf"({_NUMBER}|-?inf|nan|NaN)\s?(%|x|×)?")
_SPREAD = re.compile(rf"({_NUMBER}) \[.*\]")  # median [p20, p80]
_IN_TEXT = re.compile(r"(?<![\w.,-])([-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?)(?!\w|\.\d)")
_TRUTH = {"True": 1.0, "False": 0.0, "yes": 1.0, "no": 0.0}
_TIME = re.compile(
    r"\((?:ns|us|µs|ms|s)\)|_(?:ns|us|µs|ms|s)(?:_|\b)|# ?(?:ns|us|µs|ms|s|min)\b"
    r"|per_s\b|/s\b|\b(?:time|seconds|latency)\b",
    re.I,
)
# Columns of records and of comparisons whose numbers are in the unit that the row names, or come of such numbers.
_MEASURED = re.compile(r"(?:p\d\d|iqr|floor|predicted|n)(?:_[ab])?|ratio(?:_low|_high)?")
_TIME_UNIT = re.compile(r"(?:ns|us|µs|ms|s)|.+/s")


@dataclass(frozen=True, slots=True)
class Number:
    """`text` as shown at (row, column) of a table; `cell` counts code cells from 1, `title` is the heading above."""

    cell: int
    title: str
    table: int
    row: str
    column: str
    text: str

    @property
    def key(self) -> tuple[int, int, str, str]:
        """What makes it the same number in another run."""
        return (self.cell, self.table, self.row, self.column)

    @property
    def is_time(self) -> bool:
        """Its row or column names a time or a rate: another machine gives another value."""
        return bool(_TIME.search(self.row) or _TIME.search(self.column))

    @property
    def value(self) -> float:
        """As a float; True is 1. Percent stay percent: only ratios are taken."""
        found = _parse(self.text)
        assert found is not None
        return found[0]

    @property
    def last_digit(self) -> float:
        """What one step of the last digit shown is worth; 0 for whole numbers and True or False, which are exact."""
        found = _parse(self.text)
        assert found is not None
        return found[1]


def numbers(notebook: Any) -> list[Number]:
    """All numbers in the outputs of an executed notebook, in order."""
    found: list[Number] = []
    for place, (index, title) in enumerate(titles(notebook).items(), start=1):
        table = 0
        for output in _whole(notebook["cells"][index].get("outputs", [])):
            for entries in _tables(output):
                table += 1
                found += _named_apart([Number(place, title, table, *entry) for entry in entries])
    return found


def _whole(outputs: list[Any]) -> list[Any]:
    """The outputs without stderr, what was printed in a row as one: where a kernel cuts a stream depends on time."""
    whole: list[Any] = []
    for output in (one for one in outputs if one.get("name") != "stderr"):
        if whole and "text" in output and "text" in whole[-1]:
            whole[-1] = {**whole[-1], "text": whole[-1]["text"] + output["text"]}
        else:
            whole.append(output)
    return whole


def _tables(output: Any) -> list[list[tuple[str, str, str]]]:
    """(row, column, text) of each table of one output; text without a table counts as one."""
    data = output.get("data", {})
    if markup := data.get("text/html"):
        return _html_tables(markup)
    if "image/png" in data:
        return []  # a figure's text is its alt text, which states what its data say
    return [entries] if (entries := _text_table(output.get("text") or data.get("text/plain") or "")) else []


def _html_tables(markup: str) -> list[list[tuple[str, str, str]]]:
    from bs4 import BeautifulSoup

    tables = BeautifulSoup(markup, "html.parser").find_all("table")
    read = [_html_table(t) for t in tables if not t.find_parent(class_="moe-ribbon")]  # a ribbon is a text, not numbers
    return [entries for entries in read if entries]


def _html_table(table: Any) -> list[tuple[str, str, str]]:
    rows = _grid(table)
    heads = [row for row in rows if all(is_head for _, is_head in row)]
    unit_at = next((i for head in heads for i, (text, _) in enumerate(head) if text == "unit"), None)
    entries = []
    for row in rows:
        values = [i for i, (_, is_head) in enumerate(row) if not is_head]
        if not values:
            continue
        labels = [text for text, is_head in row if is_head and text]
        if not labels:
            labels, values = [row[values[0]][0]], values[1:]  # no index: the first column names the row
        unit = row[unit_at][0] if unit_at is not None and unit_at < len(row) else ""
        for i in values:
            above = dict.fromkeys(head[i][0] for head in heads if i < len(head) and head[i][0])
            if _parse(row[i][0]) is not None:
                entries.append((" / ".join(labels), _with_unit(" / ".join(above), unit), row[i][0]))
    return entries


def _with_unit(column: str, unit: str) -> str:
    """ "p50" of a row whose unit is ms as "p50 (ms)", a ratio of such numbers as "ratio (of time)"."""
    if not _MEASURED.fullmatch(column) or not _TIME_UNIT.fullmatch(unit):
        return column
    return f"{column} ({unit})" if column[0] in "pif" else f"{column} (of time)"


def _grid(table: Any) -> list[list[tuple[str, bool]]]:
    """Rows of (text, is it a header cell), with cells that span several repeated."""
    rows: list[list[tuple[str, bool]]] = []
    hanging: dict[int, tuple[int, tuple[str, bool]]] = {}  # column -> rows still to fill, what with
    for tr in table.find_all("tr"):
        row: list[tuple[str, bool]] = []
        cells = [
            (" ".join(c.get_text().split()), c.name == "th", _span(c, "colspan"), _span(c, "rowspan"))
            for c in tr.find_all(["th", "td"], recursive=False)
        ]
        while cells or len(row) in hanging:
            if len(row) in hanging:
                left, cell = hanging.pop(len(row))
                if left > 1:
                    hanging[len(row)] = (left - 1, cell)
                row.append(cell)
                continue
            text, is_head, wide, high = cells.pop(0)
            for _ in range(wide):
                if high > 1:
                    hanging[len(row)] = (high - 1, (text, is_head))
                row.append((text, is_head))
        if row:
            rows.append(row)
    return rows


def _span(cell: Any, name: str) -> int:
    text = str(cell.get(name, "1"))
    return min(max(int(text), 1), 1000) if text.isdigit() else 1


def _text_table(text: str) -> list[tuple[str, str, str]]:
    """Printed text: under a line of names, one value a name; elsewhere each number, named by the words around it."""
    entries: list[tuple[str, str, str]] = []
    names: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if not words:
            names = []
        elif not any(_parse(word) is not None for word in words):
            names = words if len(words) > 1 else names  # one word alone is the name of pandas' index
        elif names and len(words) in (len(names), len(names) + 1):
            columns = names if len(words) > len(names) else names[1:]
            entries += [(words[0], c, w) for c, w in zip(columns, words[1:], strict=True) if _parse(w) is not None]
        else:
            label, _, last = line.strip().rpartition("  ")
            if label and _parse(last.strip()) is not None:  # a Series of pandas: words, at least two spaces, a value
                entries.append((" ".join(label.split()), "", last.strip()))
                continue
            found = _IN_TEXT.findall(line)
            around = " ".join(_IN_TEXT.sub("#", line).split())[:120]
            entries += [(around, f"number {i}" if len(found) > 1 else "", n) for i, n in enumerate(found, start=1)]
    return entries


def _named_apart(found: list[Number]) -> list[Number]:
    """Keys that occur twice in a table get a running number."""
    seen: Counter[tuple[int, int, str, str]] = Counter()
    apart = []
    for n in found:
        seen[n.key] += 1
        row = n.row if seen[n.key] == 1 else f"{n.row} #{seen[n.key]}"
        apart.append(Number(n.cell, n.title, n.table, row, n.column, n.text))
    return apart


def _parse(text: str) -> tuple[float, float] | None:
    """Value and worth of the last digit; None for what is no number and not True or False."""
    if text in _TRUTH:
        return _TRUTH[text], 0.0
    found = _VALUE.fullmatch(text) or _SPREAD.fullmatch(text)
    if found is None:
        return None
    plain = re.sub(r"[,\u00a0\u202f ]", "", found[1]).replace("−", "-")
    value = float(plain)
    mantissa, _, power = plain.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    exact = not (decimals or power or text.endswith("%")) or (value == 0 and power)  # 0.0e+00 rounds nothing away
    return value, 0.0 if exact or value != value else 10.0 ** (int(power or 0) - decimals)
