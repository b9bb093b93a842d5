"""How the GEMV kernels' programs are cut, and which cut was fastest where. No tile changes a bit, but for `lanes`."""

from dataclasses import dataclass, replace

from moe_lab.errors import LabError
from moe_lab_kernels.gemv.forms import is_planar
from moe_lab_kernels.gemv.ref import Lanes

# Rows of a chunk that may share decoded codes. Of 8, a lane would need 255 registers, or strips so thin that each row's
# own work (1.7 instructions a weight) passes that of a row alone (1.6).
MAX_SHARED = 4


def check_powers_of_two(name: str, **values: tuple[int, int]) -> None:
    """LabError unless each field's (value, least) is a power of two, at least that."""
    for field, (value, least) in values.items():
        if value < least or value & (value - 1):
            raise LabError(f"{name}.{field} is {value}; it must be a power of two, at least {least}.")


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program of `gemv` is cut. Only `lanes` changes bits, and it is for experiments: the default is part of the
    promise.

    rows: weight rows a program takes; warps: that it runs with; sums: most fp32 accumulators a lane may hold where 32
    lanes walk a row, so n rows of a chunk walk the tile in strips of sums / n weight rows; registers: a thread's cap,
    or None; lanes: how a row is walked, or None for `ref.lanes_of`; shared: rows of a chunk that share decoded
    codes (1, 2 or 4).
    """

    rows: int
    warps: int = 1
    sums: int = 16
    registers: int | None = None
    lanes: Lanes | None = None
    shared: int = MAX_SHARED

    def __post_init__(self) -> None:
        check_powers_of_two("Tile", rows=(self.rows, 1), shared=(self.shared, 1), sums=(self.sums, self.shared))
        if self.shared > MAX_SHARED:
            raise LabError(f"Tile.shared is {self.shared}; at most {MAX_SHARED} rows share decoded codes.")


# H200, triton 3.6, microseconds for gate + up / down, T = 1: qwen3 q2_k+q3_k | q4_k+q6_k | mxfp4 | mixtral | V4.1
#   8 rows, 128 registers       5.7 / 5.3 | 9.9 / 7.3 | 8.0 / 6.1 | 25.9 / 27.8 | 18.5 / 18.3
#   4 rows, 80 registers        6.5 / 7.0 | 9.8 / 8.1 | 7.8 / 6.8 | 27.0 / 25.3 | 19.4 / 18.7
#   2 rows, 64 registers        7.2 / 8.4 | 9.3 / 8.9 | 8.8 / 8.1 | 28.9 / 23.5 | 22.3 / 20.1
# 4 to 8 warps a program lost wherever they were tried but for mixtral's down (23 with 2 rows a warp).
TILE_ONE = Tile(8, registers=128)
# T = 8, the same shapes (mixtral, V4.1: q2_k+q3_k); s: sums, r: registers, c: rows that share decoded codes
#   s8 r128 c4                  33.3 / 27.4 | 47.5 / 36.9 | 46.8 / 35.6 | 257 / 142 | 108 / 103
#   s4 r128 c2                  29.3 / 25.4 | 40.7 / 34.2 | 44.9 / 35.7 | 183 / 148 | 116 / 112
#   s4 r96 c2                   27.3 / 23.1 | 37.4 / 30.6 | 43.7 / 32.6 | 173 / 140 | 106 / 98
#   s4 r96 c1                   28.5 / 24.3 | 45.4 / 33.8 | 45.0 / 34.0 | 184 / 182 | 104 / 104
# Of s8 c4 the code alone is 53 KB (three sizes of program) and a third of the stalls were waits for instructions; 96
# registers let 20 warps onto a multiprocessor instead of 16. More rows a program (16, 32) lost.
TILE_MANY = Tile(8, sums=4, registers=96, shared=2)
# At 96 these spill; q4_k beside q6_k at 112 and 120 too, not at 104; q5_k at 128 and, with fp32 rows and slots found by
# address, at 136.
TILES_MANY = {f: Tile(8, sums=4, registers=cap, shared=2) for f, cap in (("q3_k", 112), ("q4_k", 104), ("q5_k", 144))}
# q8_0, whose code is short: 70.6 / 38.7 against 74.9 / 42.1 in the tile above.
TILE_MANY_BYTES = Tile(8, sums=8, registers=128)
# Planes, whole layers in one grid at T = 8, us: q2_k+q3_k | q4_k+q6_k | q8_0 | mxfp4 of qwen3, then mixtral, deepseek
#   s4 r96 c2 (raw blocks')     45.6 | 54.8 | 72.9 | 63.8, 253 | 339 | 460 | 385, 260 | 416 | 600 | 437
#   s8 r128 c2                  43.6 | 53.7 | 71.7 | 58.3, 204 | 264 | 429 | 327, 261 | 373 | 591 | 361
#   s8 r144 c4                  52.5 | 61.1 | 77.7 | -, 259 | 271 | 391 | -
#   s4 r128 c2                  50.6 | 56.4 | 77.7 | -, 259 | 302 | 473 | -
TILE_MANY_PLANAR = Tile(8, sums=8, registers=128, shared=2)
# In that one q4_k, q5_k and q4_0 spill 8 to 16 bytes, whatever the cap, and q3_k beside q3_k at 104, 112,
# 120 or 128, clamped or not, in an arena or by address: it wants 136.
TILES_PLANAR = {
    "planar q3_k": Tile(8, sums=8, registers=136, shared=2),
    "planar q4_k": Tile(4, sums=8, registers=136, shared=2),
    **{f"planar {f}": Tile(4, sums=8, registers=128, shared=2) for f in ("q5_k", "q4_0")},
}
# Down's programs in the one grid, whose cap is the larger of two: q4_k beside q4_k spills below 136, q2_k beside q2_k
# at 96 where slots are found by address, and clamped ones of an arena at 104; q3_k in planes beside q2_k keeps 128.
DOWN_CAPS = {"q2_k": 112, "q4_k": 136, "planar q3_k": 128}
# The interpreter pays for each operation of each program, so it takes the widest tile in one strip.
TILE_INTERPRETER = Tile(256, sums=256 * MAX_SHARED)


def tile_for(form: str, max_rows: int) -> Tile:
    """The measured cut of a GPU's programs, for chunks of at most `max_rows` rows."""
    if max_rows == 1:
        return TILE_ONE
    if is_planar(form):
        return TILES_PLANAR.get(form, TILE_MANY_PLANAR)
    return TILE_MANY_BYTES if form == "q8_0" else TILES_MANY.get(form, TILE_MANY)


# Places of an H200 for programs of TILE_ONE: 132 multiprocessors, 16 warps of 128 registers.
PLACES = 2_112


def down_tile_for(form: str, max_rows: int, chunks: int, n: int) -> Tile:
    """As `tile_for`, for programs that start when others end: where 8 rows each would fill less than half of the places
    (mixtral, T = 1: 1,024 programs), 4 rows (27.8 to 25.3 us as a launch of its own)."""
    tile = tile_for(form, max_rows)
    if max_rows == 1 and chunks * -(-n // tile.rows) <= PLACES // 2:
        return replace(tile, rows=tile.rows // 2)
    if max_rows > 1 and form in DOWN_CAPS:
        return replace(tile, registers=DOWN_CAPS[form])
    return tile


# Whole layers from planes in programs of so many warps of 8 rows, us at T = 1; last: four of 4 rows and 96 registers.
#                       1      2      4      8   4 of 4 rows
#   qwen3 q2_k+q3_k  13.7   13.9   13.8   13.4   14.1
#   qwen3 mxfp4      15.6   16.0   16.3   15.3   16.2
#   gpt-oss mxfp4    25.3   25.8   26.6   27.3   23.9
#   qwen3 q4_k+q6_k  15.6   16.2   16.4   15.8   15.7; four of 8 rows at 160 registers 14.9
FOUR_SHORT, FOUR_WIDE = Tile(16, warps=4, sums=32, registers=96), Tile(32, warps=4, sums=64, registers=160)


def tiles_of_layer(form: str, down_form: str, max_rows: int, chunks: int, f: int, d: int) -> tuple[Tile, Tile]:
    """The cut of gate's and up's programs and of down's in one grid, where gate and up have F rows, down D. Two layers
    of one token have a cut of their own, measured there alone: mxfp4 where gate and up take a wave and a half of
    programs, q4_k with q6_k where they take one."""
    programs, pair = 2 * chunks * -(-f // TILE_ONE.rows), (form, down_form)
    if max_rows == 1 and pair == ("planar mxfp4", "planar mxfp4") and PLACES < programs <= PLACES * 3 // 2:
        return FOUR_SHORT, FOUR_SHORT
    if max_rows == 1 and pair == ("planar q4_k", "planar q6_k") and programs <= PLACES:
        return FOUR_WIDE, FOUR_WIDE
    return tile_for(form, max_rows), down_tile_for(down_form, max_rows, chunks, d)
