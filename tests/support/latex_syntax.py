"""A small check of LaTeX tables: what pdfLaTeX would stop at, found without it."""

import re


def problems(source: str) -> list[str]:
    """Unbalanced braces and environments, bare special characters, rows of the wrong length, brackets after a row."""
    text = "\n".join(re.sub(r"(?<!\\)%.*", "", line) for line in source.splitlines())
    found = [f"not plain ASCII: {c!r}" for c in set(text) if ord(c) > 126 and not c.isalpha()]
    depth = 0
    for token in re.findall(r"\\.|[{}]", text, flags=re.S):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            found.append("a brace closes nothing")
    if depth:
        found.append(f"{depth} braces stay open")
    found += _environments(text)
    body = re.search(r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end\{tabular\}", text, flags=re.S)
    if body is None:
        return [*found, "no tabular"]
    columns = len(body[1])
    rows = re.sub(r"\\(top|mid|bottom)rule", "", body[2]).split("\\\\")
    if rows.pop().strip():
        found.append("the last row is not ended")
    for row in rows:
        cells = re.split(r"(?<!\\)&", row)
        if len(cells) != columns:
            found.append(f"{len(cells)} cells in {columns} columns: {row.strip()}")
        if row.strip().startswith(("[", "*")):
            found.append(f"read as an option of the row before: {row.strip()}")
    plain = re.sub(r"\$[^$]*\$", "", re.sub(r"\\[&%$#_{}]", "", text))
    found += [f"bare {c}" for c in "$#_^~<>|" if c in plain]
    return found


def _environments(text: str) -> list[str]:
    stack: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            stack.append(name)
        elif not stack or stack.pop() != name:
            return [f"\\end{{{name}}} ends nothing"]
    return [f"{name} stays open" for name in stack]
