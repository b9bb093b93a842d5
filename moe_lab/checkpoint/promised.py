"""Whether a file holds the MoE layers that its own settings promise: a layer that is missing whole leaves no half of it
behind that would be noticed.

`WhichLayers` in a family's row says how a config tells them; where it does not, a hole between two MoE layers is
refused.
"""

from collections.abc import Collection, Sequence
from typing import Any

from moe_lab.checkpoint.header_bytes import shown
from moe_lab.checkpoint.settings import Facts, text_config
from moe_lab.checkpoint.tensor_file import TensorFile
from moe_lab.errors import CheckpointError
from moe_lab.families import Family, FileRow, TensorNames, WhichLayers

_NEVER = 1 << 62
WRITTEN = "moe_lab.moe_layers"
"""Metadata key of a GGUF that `moe_lab.export` wrote of some of a model's layers: their numbers."""


def check_layers(file: TensorFile, family: Family, row: FileRow, names: TensorNames, found: Sequence[int]) -> None:
    """CheckpointError "missing tensor" for a promised layer that is not among `found`, "model shape" for one that the
    settings call dense or do not count."""
    rule = _Rule(file, family, row, found)
    missing = rule.first_missing()
    if missing is not None:
        router = names.router.replace("{layer}", str(missing))
        what = (
            f"layer {missing} is a MoE layer {rule.why}, but the file has none of its tensors. Open a model of several "
            "files by its folder or index; a family whose layers alternate says so in its row (WhichLayers)."
        )
        raise CheckpointError(file.path, "missing tensor", what, tensor=router, wanted=router)
    for number in found:
        if rule.known and not rule.allows(number):
            what = f"holds experts of layer {number}, which is no MoE layer {rule.why}."
            raise CheckpointError(file.path, "model shape", what, seen=number, wanted=rule.why)


class _Rule:
    """What one file's settings say about its layers. `known`: they say it at all; `why`: by which of them."""

    def __init__(self, file: TensorFile, family: Family, row: FileRow, found: Sequence[int]) -> None:
        self._file, self._facts, self.found = file, Facts(file, family, row, 0), found
        self._keys = row.layers or WhichLayers()
        self._sizes = row.sizes.num_experts
        self._listed = self._numbers(WRITTEN) if file.kind == "gguf" else None
        self._listed = self._numbers(self._keys.listed) if self._listed is None else self._listed
        self._kinds = next((k for key in self._keys.kinds if (k := self._words(key)) is not None), None)
        count = next((n for key in self._keys.count if (n := self._whole(key)) is not None), None)
        spare = self._whole(self._keys.spare) or 0
        self._all = None if count is None else count + (0 if self._keys.spare_counted else spare)
        self._count = None if count is None else count - (spare if self._keys.spare_counted else 0)
        listed = self._listed is not None or self._kinds is not None
        counted = row.layers is not None and self._count is not None and not self._keys.anywhere
        self.known = self._experts() is not None and (listed or counted)
        self.why = self._reason()

    def first_missing(self) -> int | None:
        """The first promised layer that is not there."""
        if not self.known:
            free = self._keys.anywhere or not self.found
            inner = () if free else range(self.found[0], self.found[-1])
            return next((n for n in inner if n not in set(self.found)), None)
        have, last = set(self.found), max(self.found, default=-1)
        if self._listed is not None:
            candidates: Collection[int] = self._listed
        elif self._kinds is not None:
            candidates = range(len(self._kinds) if self._count is None else min(self._count, len(self._kinds)))
        else:
            assert self._count is not None
            # One number past the last is enough, and as many as a period has: a hostile count is not walked through.
            candidates = range(min(self._count, last + 2 + self._step() + len(self._dense())))
        return next((n for n in candidates if n not in have and self.promises(n)), None)

    def promises(self, number: int) -> bool:
        """Whether the settings call this one a MoE layer."""
        if not self._has_experts(number):
            return False
        if self._listed is not None:
            return number in self._listed
        if self._kinds is not None:
            return number < len(self._kinds) and self._kinds[number] in self._keys.moe_kinds
        last = self._whole(self._keys.last)
        beyond = last is not None and last >= 0 and number > last
        inside = self._count is not None and self._start() <= number < self._count
        return inside and not beyond and (number + 1) % self._step() == 0 and number not in self._dense()

    def allows(self, number: int) -> bool:
        """Whether experts of this layer are no contradiction: promised, or of the layers that predict ahead."""
        spare = self._all is not None and self._count is not None and self._count <= number < self._all
        return spare or self.promises(number)

    def _start(self) -> int:
        """The first promised layer; the first found where a file may begin with dense ones and does not say so."""
        said = self._whole(self._keys.first)
        if said is not None or not self._keys.lead:
            return said or 0
        return min(self.found, default=_NEVER)

    def _step(self) -> int:
        return max(self._whole(self._keys.step) or 1, 1)

    def _dense(self) -> Collection[int]:
        return self._numbers(self._keys.dense) or ()

    def _has_experts(self, number: int) -> bool:
        """Whether the number of experts, which may be 0 for some layers or for all, is some here."""
        counts = self._experts()
        return (number < len(counts) and counts[number] != 0) if isinstance(counts, list) else counts != 0

    def _experts(self) -> Any:
        """What the file gives as its number of experts: one, or one for each layer."""
        return next((count for key in self._sizes if (count := self._raw(key)) is not None), None)

    def _raw(self, key: str | None) -> Any:
        if key is None:
            return None
        file = self._file
        source = text_config(file.config) if file.kind == "safetensors" else file.metadata
        return source.get(self._facts.key(key))

    def _whole(self, key: str | None) -> int | None:
        value = self._raw(key)
        return value if type(value) is int else None

    def _numbers(self, key: str | None) -> frozenset[int] | None:
        """Whole numbers of a list, or of text with commas."""
        value = self._raw(key)
        if isinstance(value, str):
            parts = [part.strip() for part in value.split(",")]
            return frozenset(int(p) for p in parts if p.isascii() and p.isdigit() and len(p) < 10)
        return frozenset(n for n in value if type(n) is int) if isinstance(value, list) else None

    def _words(self, key: str) -> Sequence[str] | None:
        """A word a layer: a list of them, or a text with a letter for each."""
        value = self._raw(key)
        return value if isinstance(value, str) or (isinstance(value, list) and value) else None

    def _reason(self) -> str:
        if not self.known:
            return "by those around it"
        keys = self._keys
        names = (WRITTEN, *keys.count, keys.first, keys.last, keys.step, keys.dense, keys.listed, *keys.kinds)
        said = [(self._facts.key(key), self._raw(key)) for key in names if key is not None]
        given = [f"{shown(key)} = {str(v)[:60]}" for key, v in said if v is not None and v != []]
        return f"by {', '.join(given)}"
