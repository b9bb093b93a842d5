"""Where the small trained model lies."""

import os
from pathlib import Path

from moe_lab.errors import LabError

SAMPLE_NAME = "lab-42m.gguf"
DATA_VARIABLE = "MOE_LAB_DATA"


def sample() -> Path:
    """The sample model, in the folder that MOE_LAB_DATA names or in `data/` beside the source; else LabError."""
    named = os.environ.get(DATA_VARIABLE)
    folder = Path(named) if named else Path(__file__).resolve().parent.parent / "data"
    path = folder / SAMPLE_NAME
    if path.is_file():
        return path
    where = f"{DATA_VARIABLE} names {folder}, which holds" if named else "this installation holds"
    raise LabError(
        f"{where} no {SAMPLE_NAME}: wheels come without data. Clone the project's repository, whose data/ folder "
        f"has it, and set {DATA_VARIABLE} to that folder."
    )
