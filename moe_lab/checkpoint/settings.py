"""A file's metadata as a family's row asks for it: sizes and settings of one layer, each checked.

A GGUF's metadata have their architecture in the keys; a Hugging Face model's are its config.json, in which a text model
inside a larger one has a section of its own. A list holds a value for each layer.
"""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_lab.checkpoint.header_bytes import shown
from moe_lab.checkpoint.tensor_file import TensorFile
from moe_lab.errors import CheckpointError
from moe_lab.families import Family, FileRow, FileSetting


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config with its text model's own section over it."""
    own = config.get("text_config")
    return {**config, **own} if isinstance(own, Mapping) else config


@dataclass(frozen=True, slots=True)
class Facts:
    """What one file says about one layer of a family."""

    file: TensorFile
    family: Family
    row: FileRow
    layer: int

    def value(self, key: str) -> Any:
        """The value of a key for this layer, None where it is absent or null."""
        source = text_config(self.file.config) if self.file.kind == "safetensors" else self.file.metadata
        value = source.get(self.key(key))
        if not isinstance(value, list):
            return value
        if self.layer >= len(value):
            raise CheckpointError(
                self.file.path, "value",
                f"{shown(self.key(key))} lists {len(value)} layers, but layer {self.layer} has experts too.",
                seen=len(value), wanted=f"at least {self.layer + 1} values",
            )  # fmt: skip
        return value[self.layer]

    def key(self, pattern: str) -> str:
        """The key's full name in this file."""
        return pattern.replace("{arch}", str(self.file.metadata.get("general.architecture", "")))

    def size(self, keys: tuple[str, ...]) -> int | None:
        """A whole number of at least 1 under the first key that is there, None when none is."""
        for key in keys:
            value = self.value(key)
            if value is None:
                continue
            if type(value) is not int or value < 1:
                raise self.wrong(key, value, "a whole number of at least 1")
            return value
        return None

    def needed(self, keys: tuple[str, ...]) -> int:
        """The same; CheckpointError "missing key" when there is none."""
        size = self.size(keys)
        if size is None:
            names = [self.key(key) for key in keys]
            where = "config.json" if self.file.kind == "safetensors" else "the metadata"
            raise CheckpointError(
                self.file.path, "missing key",
                f"{where} has no {' or '.join(shown(name) for name in names)}, which a MoE layer needs.",
                wanted=names[0],
            )  # fmt: skip
        return size

    def settings(self) -> dict[str, dict[str, Any]]:
        """Spec fields by record: what this kind of file means by default, then what this one says."""
        found = {"router": dict(self.row.router), "layer": dict(self.row.layer), "shared": dict(self.row.shared)}
        for setting in self.row.settings:
            if setting.when is not None and self.value(setting.when[0]) != setting.when[1]:
                continue
            value = self.value(setting.key)
            if value is not None and value != setting.unset:
                record, _, name = setting.field.partition(".")
                found[record][name] = self._decoded(setting, value)
        return found

    def _decoded(self, setting: FileSetting, value: Any) -> Any:
        whole = setting.kind is float and type(value) is int
        if type(value) is not setting.kind and not whole:
            raise self.wrong(setting.key, value, f"a {setting.kind.__name__}")
        if setting.kind is float and not math.isfinite(value):
            raise self.wrong(setting.key, value, "a finite number")
        if setting.off is not None and value == setting.off:
            return None
        if setting.codes is None:
            return float(value) if whole else value
        if value not in setting.codes:
            known = ", ".join(f"{code} ({name})" for code, name in setting.codes.items())
            raise self.wrong(setting.key, value, f"one that family {self.family.name} knows: {known}")
        return setting.codes[value]

    def wrong(self, key: str, value: Any, wanted: str) -> CheckpointError:
        """The error for a value that cannot be."""
        return CheckpointError(
            self.file.path, "value", f"{shown(self.key(key))} is {reprlib.repr(value)}; wanted {wanted}.",
            seen=value, wanted=wanted,
        )  # fmt: skip
