"""Model families: one row each, all settings of one pipeline. Nothing branches on a name."""

from collections.abc import Mapping
from typing import Any

from moe_lab.errors import LabError
from moe_lab.families.files import FileRow, FileSetting, SizeKeys, TensorNames, When, WhichLayers
from moe_lab.families.gguf_files import gguf_file
from moe_lab.families.hf_files import hf_file
from moe_lab.families.row import Family, ModuleNames, ModuleSetting
from moe_lab.families.rows import ROWS
from moe_lab.protocols import check_object

FAMILIES: dict[str, Family] = {row.name: row for row in ROWS}


def get_family(family: "str | Family") -> Family:
    """A family by name, or the user's own object unchanged: a Family (`dataclasses.replace` makes one from a row of
    FAMILIES) or what has all its members. LabError for an unknown name, LabTypeError for what lacks a member."""
    if isinstance(family, str):
        if family not in FAMILIES:
            raise LabError(
                f"no family is called {family!r}; known: {', '.join(FAMILIES)}. Pass a Family of your own for another "
                "one."
            )
        return FAMILIES[family]
    if not isinstance(family, Family):
        check_object(family, Family, "family", ("qwen3_moe", "mixtral", "..."))
    return family


def family_of_gguf(metadata: Mapping[str, Any]) -> Family | None:
    """The family of a GGUF by its `general.architecture`, and by other keys where two share one; None without a row."""
    arch = metadata.get("general.architecture")
    rows = [row for row in FAMILIES.values() if row.gguf is not None and _is(row.gguf, arch)]
    return next((row for row in rows if row.gguf and _holds(row.gguf.when, metadata, str(arch))), None)


def family_of_config(config: Mapping[str, Any]) -> Family | None:
    """The family of a Hugging Face model by its config's `model_type`; None without a row."""
    rows = (row for row in FAMILIES.values() if row.hf is not None and _is(row.hf, config.get("model_type")))
    return next(rows, None)


def family_of_module(class_names: "list[str]") -> Family | None:
    """The family of a transformers module by its class names, the most derived first; None for one without a row."""
    for name in class_names:
        for row in FAMILIES.values():
            if row.module is not None and name in row.module.classes:
                return row
    return None


def _is(row: FileRow, kind: object) -> bool:
    return isinstance(kind, str) and kind in row.types


def _holds(conditions: tuple[When, ...], metadata: Mapping[str, Any], arch: str) -> bool:
    for condition in conditions:
        value = metadata.get(condition.key.format(arch=arch))
        if value not in condition.values if condition.values else value is None:
            return False
    return True


__all__ = [
    "FAMILIES", "Family", "FileRow", "FileSetting", "ModuleNames", "ModuleSetting", "SizeKeys", "TensorNames", "When",
    "WhichLayers", "family_of_config", "family_of_gguf", "family_of_module", "get_family", "gguf_file", "hf_file",
]  # fmt: skip
