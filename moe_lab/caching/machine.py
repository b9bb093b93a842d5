"""This machine's calibrated speeds, as the cost model takes them."""

import os

from moe_lab.errors import LabError
from moe_lab.stream.calibration import Calibration, load_calibration


def speeds(
    path: str | os.PathLike[str],
    *,
    device: str | None = None,
    expert_bytes: int | None = None,
    calibration: Calibration | None = None,
) -> dict[str, float]:
    """Keyword arguments for `Cost.fit`: disk_gb_per_s of the disk that holds `path`, and copy_gb_per_s to `device` (its
    name in the calibration) at `expert_bytes` a copy. `calibration`: default the one that `moe-lab calibrate` saved.
    LabError for a disk or device that was not measured: no speed is guessed.
    """
    known = load_calibration() if calibration is None else calibration
    surface = known.disk_of(path)
    if surface is None:
        raise LabError(f"the disk of {path} was not calibrated: run moe-lab calibrate {path}.")
    found = {"disk_gb_per_s": surface.best().gb_per_s}
    if device is not None:
        if expert_bytes is None:
            raise LabError("speeds(device=) wants expert_bytes as well: a copy's speed depends on its size.")
        ms = known.copy_ms(device, expert_bytes)
        if ms is None:
            names = ", ".join(known.host_device) or "none"
            raise LabError(f"copies to {device!r} were not calibrated (there are: {names}): run moe-lab calibrate.")
        found["copy_gb_per_s"] = expert_bytes / ms / 1e6
    return found
