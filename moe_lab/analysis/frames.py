"""Rows to tables: the one place of this package that needs pandas."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from moe_lab.errors import MissingExtra

if TYPE_CHECKING:
    import pandas as pd


def frame(rows: Iterable[Sequence[Any]], columns: Sequence[str], need: str) -> "pd.DataFrame":
    """A DataFrame of `rows`. MissingExtra, naming `need`, where pandas is absent."""
    return pandas(need).DataFrame(list(rows), columns=list(columns))


def pandas(need: str) -> Any:
    """The module pandas. MissingExtra, naming `need`, where it is absent."""
    try:
        import pandas as found
    except ImportError as error:
        raise MissingExtra("pandas", "lab", f"lab.analysis.{need}") from error
    return found
