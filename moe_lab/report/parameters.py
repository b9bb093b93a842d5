"""The `parameters` cell of a notebook: which names it sets, and a copy of the notebook that runs with other values.

The convention is papermill's (a code cell tagged `parameters`, an `injected-parameters` cell right after it), so its
users can run the same files. Unlike there, a name that the cell does not set is refused, and so is a notebook without
the cell: a value put on top would be overwritten without a word.
"""

import ast
import copy
from typing import Any

from moe_lab.errors import LabError, LabTypeError


def parameter_names(notebook: Any, where: str) -> list[str]:
    """Names assigned in the one cell tagged `parameters`. `where` names the notebook in errors."""
    cells = _tagged(notebook, "parameters")
    if len(cells) != 1:
        raise LabError(
            f"{where} has {len(cells)} cells tagged 'parameters'; wanted exactly one. Tag the cell of settings."
        )
    names = []
    try:
        body = ast.parse(cells[0]["source"]).body
    except SyntaxError as error:
        raise LabError(
            f"{where}: the cell tagged 'parameters' is not Python: {error.msg} in line {error.lineno}."
        ) from error
    for node in body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def with_parameters(notebook: Any, params: dict[str, Any], where: str) -> Any:
    """A copy of the notebook with `params` assigned in a cell after the `parameters` cell. Values: Python literals."""
    made = copy.deepcopy(notebook)
    if not params:
        return made
    known = parameter_names(notebook, where) if _tagged(notebook, "parameters") else []
    for name, value in params.items():
        if name not in known:
            have = f"it sets {', '.join(known)}" if known else "it has no cell tagged 'parameters'"
            raise LabError(f"{where} has no parameter {name!r}: {have}.")
        _check_literal(name, value)
    at = made["cells"].index(_tagged(made, "parameters")[0])
    made["cells"].insert(at + 1, _cell("\n".join(f"{name} = {value!r}" for name, value in params.items())))
    return made


def _tagged(notebook: Any, tag: str) -> list[Any]:
    return [c for c in notebook["cells"] if c["cell_type"] == "code" and tag in c["metadata"].get("tags", [])]


def _check_literal(name: str, value: Any) -> None:
    try:
        same = ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        same = False
    if not same:
        raise LabTypeError(
            f"Parameter {name!r} is a {type(value).__name__}; wanted a Python literal (number, text, list, dict, None)."
        )


def _cell(source: str) -> Any:
    import nbformat

    return nbformat.from_dict(
        {
            "cell_type": "code",
            "id": "injected-parameters",
            "metadata": {"tags": ["injected-parameters"]},
            "execution_count": None,
            "outputs": [],
            "source": source,
        }
    )
