"""The lab's exceptions: every message names the thing, what came, what was wanted and, where it can, the fix.

`LabError` is a `ValueError`, so code that does not know the lab still catches it sensibly.
"""

from pathlib import Path


class LabError(ValueError):
    """Bad input to the lab: shapes, values, names or options that cannot work together."""


class LabTypeError(LabError, TypeError):
    """An argument of the wrong type or dtype."""


class MissingExtra(LabError, ImportError):
    """An optional package is absent; the message says which extra of `moe-lab` installs it."""

    def __init__(self, package: str, extra: str, need: str) -> None:
        super().__init__(f"{need} needs {package!r}, which is not installed: pip install 'moe-lab[{extra}]'.")


class CheckpointError(LabError):
    """A broken, hostile or unsupported model file.

    Attributes: `file` (path as given), `tensor` (name or None), `seen`, `wanted` (short texts or None) and
    `reason` (one word, stable, for programs).
    """

    def __init__(
        self,
        file: str | Path,
        reason: str,
        message: str,
        *,
        tensor: str | None = None,
        seen: object = None,
        wanted: object = None,
    ) -> None:
        self.file, self.reason, self.tensor, self.seen, self.wanted = str(file), reason, tensor, seen, wanted
        where = f"{self.file}: tensor {tensor!r}: " if tensor is not None else f"{self.file}: "
        super().__init__(where + message)
