"""What commands share: options of one meaning, and how an answer ends the process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
File = Annotated[Path, typer.Argument(help="A GGUF, a safetensors file, its index, or a model folder.")]


def answer(command: str, rows: Sequence[dict[str, Any]], *, ok: bool = True, **shown: Any) -> None:
    """Print a command's rows as `output.emit` does; exit code 1 where they say no."""
    from moe_lab.cli.output import emit

    emit(command, rows, ok=ok, **shown)
    if not ok:
        raise typer.Exit(1)
