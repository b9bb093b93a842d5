"""Text as LaTeX: escaping, and a booktabs table. Knows strings alone."""

import re
from collections.abc import Sequence

_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "`": r"\textasciigrave{}",
    # Signs that the lab's own tables use and pdfLaTeX has no character for.
    "µ": r"\textmu{}", "μ": r"\textmu{}", "–": "--", "—": "---", "−": "$-$", "×": r"$\times$", "·": r"$\cdot$",
    "≤": r"$\le$", "≥": r"$\ge$", "∞": r"$\infty$", "…": r"\ldots{}", "\N{NO-BREAK SPACE}": "~",
}  # fmt: skip


def escape(text: str) -> str:
    """`text` as LaTeX that prints it, on one line. Letters beyond ASCII stay: LaTeX reads UTF-8."""
    one_line = "".join(c if c.isprintable() or c in _SPECIAL else " " for c in text).strip()
    return "".join(_SPECIAL.get(c, c) for c in one_line)


def number(text: str) -> str:
    """A number's text: 1.2e-05 becomes 1.2 times a power of ten, and a minus sign is one."""
    powers = re.sub(r"(-?[\d.,]+)e([-+]?)0*(\d+)", _power, text)
    return re.sub(r"(?<![\w$^{])-(?=[\d$])", "$-$", powers)


def _power(found: re.Match[str]) -> str:
    sign = "-" if found[2] == "-" else ""
    return rf"${found[1]}\times 10^{{{sign}{found[3]}}}$"


def tabular(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[bool],
    *,
    caption: str = "",
    label: str = "",
) -> str:
    """A `table` with a booktabs `tabular`: text flush left, numbers flush right."""
    lines = ["% needs \\usepackage{booktabs}", "\\begin{table}", "  \\centering"]
    if caption:
        lines.append(f"  \\caption{{{escape(caption)}}}")
    if label:
        lines.append(f"  \\label{{{re.sub(r'[^A-Za-z0-9:._-]', '-', label)}}}")
    lines.append(f"  \\begin{{tabular}}{{{''.join('r' if n else 'l' for n in numeric)}}}")
    lines += ["    \\toprule", _row([escape(h) for h in headers]), "    \\midrule"]
    lines += [
        _row([number(c) if n and c != "–" else escape(c) for c, n in zip(row, numeric, strict=True)]) for row in rows
    ]
    lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}"]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    # After \\ a bracket would be read as its optional argument and a star as its variant.
    first, *rest = cells
    first = f"{{}}{first}" if first[:1] in ("[", "*") else first
    return f"    {' & '.join([first, *rest])} \\\\"
