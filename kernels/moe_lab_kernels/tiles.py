"""How the GEMV's programs are cut, and which cut was fastest where. No tile changes a bit, but for `lanes`."""

from dataclasses import dataclass

from moe_lab.errors import LabError

# Rows of a chunk that share decoded codes. Of 8, a lane would need 255 registers, or strips so thin that each row's own
# work (1.7 instructions a weight) passes that of a row alone (1.6); of 4 it takes 1.2.
MAX_SHARED = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program is cut. Only `lanes` changes bits, and it is for experiments: the default is part of the promise.

    rows: weight rows a program takes; warps: that it runs with; sums: most fp32 accumulators a lane may hold, so n rows
    of a chunk walk the tile in strips of sums / n weight rows; registers: a thread's cap, or None; lanes: a block's
    lanes (4 or 8), or None for `decode_ref.lanes_per_block`.
    """

    rows: int
    warps: int = 1
    sums: int = 16
    registers: int | None = None
    lanes: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("rows", self.rows, 1), ("sums", self.sums, MAX_SHARED)):
            if value < least or value & (value - 1):
                raise LabError(f"Tile.{name} is {value}; it must be a power of two, at least {least}.")


# Measured on an H200 (triton 3.6), microseconds for the qwen3 / deepseek / mixtral / V4.1 shapes (benchmarks/
# first_timings.py). Registers capped at 128 unless said.
#                            8 rows                  8 rows, strips of 8 sums   4 rows, strips of 8 sums
#   T = 1, gate + up, q2_k   6 / 29 / 28 / 20        (uncapped: 7 / 33 / 32 / 24; 4 rows, uncapped: 7 / 34 / 33 / 23)
#   T = 1, down, q3_k        7 / 24 / 29 / 22        (uncapped: 7 / 25 / 27 / 24; 4 rows, uncapped: 8 / 26 / 28 / 24)
#   T = 8, gate + up, q2_k   42 / 212 / 367 / 121    38 / 198 / 321 / 120       36 / 230 / 306 / 149
#   T = 8, down, q3_k        44 / 186 / 176 / 127    37 / 166 / 189 / 129       36 / 167 / 167 / 139
# Uncapped, T = 8 takes 1.1 to 1.5 times as long; 16 rows and 2 warps lost at T = 1. q8_0 follows, unmeasured.
TILE_ONE, TILE_MANY = Tile(8, registers=128), Tile(8, sums=8, registers=128)
# The interpreter pays for each operation of each program, so it takes the widest tile in one strip.
TILE_INTERPRETER = Tile(256, sums=256 * MAX_SHARED)
