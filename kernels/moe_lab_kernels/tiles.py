"""How the GEMV kernels' programs are cut, and which cut was fastest where. No tile changes a bit, but for `lanes`."""

from dataclasses import dataclass

from moe_lab.errors import LabError
from moe_lab_kernels.decode_ref import Lanes

# Rows of a chunk that share decoded codes. Of 8, a lane would need 255 registers, or strips so thin that each row's own
# work (1.7 instructions a weight) passes that of a row alone (1.6); of 4 it takes 1.2.
MAX_SHARED = 4


def _powers_of_two(name: str, **values: tuple[int, int]) -> None:
    for field, (value, least) in values.items():
        if value < least or value & (value - 1):
            raise LabError(f"{name}.{field} is {value}; it must be a power of two, at least {least}.")


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program of `gemv` is cut. Only `lanes` changes bits, and it is for experiments: the default is part of the
    promise.

    rows: weight rows a program takes; warps: that it runs with; sums: most fp32 accumulators a lane may hold where 32
    lanes walk a row, so n rows of a chunk walk the tile in strips of sums / n weight rows; registers: a thread's cap,
    or None; lanes: how a row is walked, or None for `decode_ref.lanes_of`.
    """

    rows: int
    warps: int = 1
    sums: int = 16
    registers: int | None = None
    lanes: Lanes | None = None

    def __post_init__(self) -> None:
        _powers_of_two("Tile", rows=(self.rows, 1), sums=(self.sums, MAX_SHARED))


@dataclass(frozen=True, slots=True)
class GatedTile:
    """How a program of `gemv_gated` is cut: `groups` blocks of 32 hidden values, `shared` rows of a chunk (1, 2 or 4)
    that share decoded codes; the rest as in `Tile`."""

    groups: int = 1
    warps: int = 8
    shared: int = MAX_SHARED
    registers: int | None = 128
    lanes: Lanes | None = None

    def __post_init__(self) -> None:
        _powers_of_two("GatedTile", groups=(self.groups, 1), shared=(self.shared, 1))


@dataclass(frozen=True, slots=True)
class CombineTile:
    """How a program of `gemv_combine` is cut: `rows` weight rows, `together` slots of a token side by side (None: the
    largest power of two that divides K, at most 8); the rest as in `Tile`."""

    rows: int = 8
    warps: int | None = None
    together: int | None = None
    registers: int | None = 128
    lanes: Lanes | None = None

    def __post_init__(self) -> None:
        _powers_of_two("CombineTile", rows=(self.rows, 1))
        if self.together is not None:
            _powers_of_two("CombineTile", together=(self.together, 1))

    def slots(self, k: int) -> int:
        """Slots side by side of K."""
        return self.together or min(8, k & -k)


# Measured on an H200 (triton 3.6), microseconds for the qwen3 / deepseek / mixtral / V4.1 shapes (benchmarks/
# first_timings.py), with 32 lanes a row. Registers capped at 128 unless said.
#                            8 rows                  8 rows, strips of 8 sums   4 rows, strips of 8 sums
#   T = 1, gate + up, q2_k   6 / 29 / 28 / 20        (uncapped: 7 / 33 / 32 / 24; 4 rows, uncapped: 7 / 34 / 33 / 23)
#   T = 1, down, q3_k        7 / 24 / 29 / 22        (uncapped: 7 / 25 / 27 / 24; 4 rows, uncapped: 8 / 26 / 28 / 24)
#   T = 8, gate + up, q2_k   42 / 212 / 367 / 121    38 / 198 / 321 / 120       36 / 230 / 306 / 149
#   T = 8, down, q3_k        44 / 186 / 176 / 127    37 / 166 / 189 / 129       36 / 167 / 167 / 139
# Uncapped, T = 8 takes 1.1 to 1.5 times as long; 16 rows and 2 warps lost at T = 1. q8_0 follows, unmeasured.
TILE_ONE, TILE_MANY = Tile(8, registers=128), Tile(8, sums=8, registers=128)
# gated, H200, microseconds at T = 8 for the qwen3 / mixtral shapes, 1, 2, 4 rows sharing decoded codes (8 warps): 42,
# 46, 58 / 238, 245, 423: a thread has 8 weight rows already, so more sums spill. 16 warps took 1.4 to 1.6 as long.
GATED_FEW = GATED_MANY = GatedTile(shared=1)
COMBINE_FEW = CombineTile(4)
# The interpreter pays for each operation of each program, so it takes the widest tile in one strip.
TILE_INTERPRETER = Tile(256, sums=256 * MAX_SHARED)
