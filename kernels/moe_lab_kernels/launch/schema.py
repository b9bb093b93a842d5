"""What a launch table may say: for each kernel, the fields of its tile and the values that each may have.

Only what changes no bit is here. Values are what the launchers accept at any shape; whether a tile fits a GPU's
registers and shared memory the tuner finds out by running it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Whole(NamedTuple):
    """A whole number: from `least` to `most`, a power of two where asked, or None where that means the default."""

    least: int
    most: int
    power_of_two: bool = False
    absent: bool = False

    def refusal(self, value: Any) -> str | None:
        """Why a value is not allowed."""
        if value is None:
            fits = self.absent
        else:
            fits = type(value) is int and self.least <= value <= self.most
            fits = fits and (not self.power_of_two or value & (value - 1) == 0)
        if fits:
            return None
        what = "a power of two" if self.power_of_two else "a whole number"
        return f"wanted {what} from {self.least} to {self.most}{' or null' if self.absent else ''}, got {value!r}"


Fields = Mapping[str, Whole]

# A thread's cap; below 24 the assembler refuses, 255 is all that an instruction can name.
REGISTERS = Whole(24, 255, absent=True)
WARPS, WARPGROUPS = Whole(1, 16, power_of_two=True), Whole(4, 16, power_of_two=True)
STAGES, GROUP = Whole(1, 8), Whole(1, 64)
# 64 rows or more, so that one kind of tensor-core instruction serves every tile
_INTEGER = {"rows": Whole(16, 256, power_of_two=True), "warps": WARPS, "stages": STAGES, "group": GROUP,
            "registers": REGISTERS}  # fmt: skip
_TENSOR = {**_INTEGER, "rows": Whole(64, 256, power_of_two=True), "warps": WARPGROUPS, "resident": Whole(0, 8)}

KERNELS: dict[str, Fields] = {
    "grouped": _TENSOR,
    "grouped_fp8": {**_TENSOR, "rows": Whole(64, 128, power_of_two=True)},
    # hidden rows leave quantised: a program makes the 128 values that a scale serves
    "grouped_fp8_hidden": {**_TENSOR, "rows": Whole(128, 128)},
    "mmq": _INTEGER,
    "wide": {**_INTEGER, "tokens": Whole(16, 128, power_of_two=True)},
}
