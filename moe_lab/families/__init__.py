"""Model families: one row each, all settings of one pipeline. Nothing branches on a name."""

from moe_lab.errors import LabError, LabTypeError
from moe_lab.families.row import Family, FileSetting, GgufKeys, GgufTensors, ModuleNames, ModuleSetting
from moe_lab.families.rows import ROWS

FAMILIES: dict[str, Family] = {row.name: row for row in ROWS}


def get_family(family: "str | Family") -> Family:
    """A family by name, or the user's own object unchanged. LabError for an unknown name."""
    if isinstance(family, Family):
        return family
    if not isinstance(family, str):
        raise LabTypeError(f"a family is a name or a Family, got {type(family).__name__}.")
    if family not in FAMILIES:
        raise LabError(
            f"no family is called {family!r}; known: {', '.join(FAMILIES)}. Pass a Family of your own for another one."
        )
    return FAMILIES[family]


def family_of_arch(arch: object) -> Family | None:
    """The family of a GGUF architecture, None for one without a row."""
    return next((row for row in FAMILIES.values() if arch is not None and row.gguf_arch == arch), None)


def family_of_module(class_names: "list[str]") -> Family | None:
    """The family of a transformers module by its class names, the most derived first; None for one without a row."""
    for name in class_names:
        for row in FAMILIES.values():
            if row.module is not None and name in row.module.classes:
                return row
    return None


__all__ = [
    "FAMILIES", "Family", "FileSetting", "GgufKeys", "GgufTensors", "ModuleNames", "ModuleSetting", "family_of_arch",
    "family_of_module", "get_family",
]  # fmt: skip
