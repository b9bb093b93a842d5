"""`moe-lab report`: a notebook executed and written as one HTML file."""

from pathlib import Path
from typing import Any

from moe_lab.errors import LabError
from moe_lab.open import open as open_checkpoint


def tour() -> Path:
    """The tour notebook of this checkout. LabError in an installed wheel, which ships no notebooks."""
    path = Path(__file__).resolve().parents[2] / "notebooks" / "00_tour.ipynb"
    if not path.is_file():
        raise LabError(
            "the tour notebook is not part of the installed package: clone the project, or name one with --notebook."
        )
    return path


def write_report(
    *, model: Path | None, notebook: Path | None, out: Path | None, quiet: bool
) -> tuple[dict[str, Any], list[str], bool]:
    """Execute and export. Returns a row (notebook, report, seconds, kilobytes), the breakdown the notebook printed, and
    True; for a notebook whose assertion failed a row (notebook, claim), what failed where, and False.
    """
    from moe_lab.report.execute import CellError
    from moe_lab.report.run import run, show_progress

    params: dict[str, Any] = {}
    if model is not None:
        with open_checkpoint(model) as ckpt:
            if ckpt.spec is None:
                raise LabError(f"{model} holds no MoE layer of a known family: nothing to report on.")
        params["model_file"] = str(model.resolve())
    source = notebook if notebook is not None else tour()
    target = out if out is not None else Path("reports") / f"{source.stem}.html"
    try:
        made = run(source, target, progress=None if quiet else show_progress, **params)
    except CellError as error:
        if not error.is_claim:
            raise
        return {"notebook": source.name, "claim": error.why}, [f"a claim fails: {error}"], False
    row = {
        "notebook": source.name,
        "report": str(made.path),
        "seconds": made.seconds,
        "kilobytes": made.path.stat().st_size // 1024,
    }
    return row, [text for text in [made.text("breakdown")] if text], True
