"""Run notebooks and write their reports: `python tools/reports.py [NOTEBOOK...]` (default: all in notebooks/).

Prints a line a cell while it runs, then what the cells tagged `breakdown` printed, then the report's path.
Exit codes: 0 written, 1 a cell failed, 2 nothing to run (missing notebook, model file or package).
"""

import argparse
import sys
from pathlib import Path

from moe_lab.errors import LabError
from moe_lab.report import CellError, run, show_progress

ROOT = Path(__file__).resolve().parents[1]


def write(notebook: Path) -> int:
    """Run one notebook; its exit code."""
    print(f"Running {notebook.name}", flush=True)
    try:
        report = run(notebook, ROOT / "reports" / f"{notebook.stem}.html", progress=show_progress)
    except CellError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except LabError as error:
        print(f"\n{error}", file=sys.stderr)
        return 2
    if breakdown := report.text("breakdown"):
        print(f"\n{breakdown}")
    size = f"{report.path.stat().st_size / 1e6:.1f} MB"
    print(f"\nReport: {report.path} ({size}, {report.seconds:.0f} s). Open it in a browser.")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path)
    notebooks = parser.parse_args().notebooks or sorted((ROOT / "notebooks").glob("*.ipynb"))
    if not notebooks:
        print("There is no notebook in notebooks/. Is this a full checkout?", file=sys.stderr)
        return 2
    return max(write(notebook) for notebook in notebooks)


if __name__ == "__main__":
    sys.exit(main())
