"""How programs on weights in tiles are cut, and which cut was fastest where. No cut changes a bit."""

from dataclasses import dataclass

from moe_lab.errors import LabError
from moe_lab_kernels.gemv.tiles import MAX_SHARED, check_powers_of_two


@dataclass(frozen=True, slots=True)
class TileCut:
    """How a program of `gemv_tiled` is cut; nothing of it changes a bit.

    tiles: of 16 weight rows that a program takes; warps: that it runs with, over which a row's parts are laid;
    registers: a thread's cap, or None; shared: rows of a chunk that are multiplied at once (1, 2 or 4).
    """

    tiles: int = 1
    warps: int = 4
    registers: int | None = None
    shared: int = 2

    def __post_init__(self) -> None:
        check_powers_of_two("TileCut", tiles=(self.tiles, 1), warps=(self.warps, 1), shared=(self.shared, 1))
        if self.shared > MAX_SHARED:
            raise LabError(f"TileCut.shared is {self.shared}; at most {MAX_SHARED} rows are multiplied at once.")


# Formats whose step is short enough that a thread holds two tiles of it for two rows of a chunk.
TWO_TILES = ("q2_k", "q4_k", "q8_0", "q4_0")


def cut_for(on: str, format: str, max_rows: int, parts: int, n: int) -> TileCut:
    """The measured cut of a GPU's programs, for chunks of at most `max_rows` rows and weight rows of so many parts:
    four warps, over which parts are laid first, then tiles. In the interpreter, which pays for each operation of each
    program, few large ones."""
    if on != "cuda":
        return TileCut(tiles=min(16, 1 << max(0, -(-n // 16) - 1).bit_length()), warps=1, shared=4)
    if max_rows == 1:
        return TileCut(4 // parts, registers=96, shared=1)
    return TileCut(2 if parts == 4 and format in TWO_TILES else 4 // parts, registers=128)
