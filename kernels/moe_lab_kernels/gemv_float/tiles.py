"""How the float GEMV's programs are cut, and which cut was fastest where. No tile changes a bit."""

from dataclasses import dataclass, replace

from moe_lab_kernels import backend
from moe_lab_kernels.storage.scaled_layouts import LAYOUTS


@dataclass(frozen=True, slots=True)
class FloatTile:
    """How a program is cut. rows: weight rows (of each matrix); sums: fp32 sums a lane holds of a matrix, so n rows of
    a chunk walk the tile in strips of sums / n weight rows; shared: rows of a chunk that share decoded weights (1, 2, 4
    or 8); warps: that a program has; registers: a thread's cap."""

    rows: int = 8
    sums: int = 8
    shared: int = 8
    warps: int = 1
    registers: int | None = None


# H200, triton 3.6, microseconds of qwen3's shape (mxfp4_oss: gpt-oss's), whole sweep in benchmarks/results/h200/
# float_decode_timings.csv. T = 1, rows of gate and of up a program, 1 / 2 / 4: bf16 16.5 / 15.0 / 16.0, fp8_block
# 11.2 / 9.7 / 11.3, mxfp4_oss 20.1 / 18.5 / 21.9; down, 2 / 4 / 8: bf16 10.5 / 10.1 / 9.2, fp8_block 8.8 / 7.6 / 7.2,
# int4_g64 8.3 / 7.1 / 8.2. T = 8, two rows of gate and of up; 2, 4, 8 rows of a chunk together (the first two capped at
# 96 registers): bf16 86.3, 82.6, 83.5; fp8_block 51.1, 51.1, 55.1; mxfp4_oss 117, 118, 113; four or eight sums a lane
# lose (92, 57, 155). Down: bf16 49.2, 52.5, 47.2; fp8_block 38.9, 40.9, 39.2; mxfp4_oss 61.5, 62.9, 63.6, and 60.1 with
# twice the sums.
GATE_ONE, DOWN_ONE = FloatTile(2, 2), FloatTile(4, 4)
GATE_MANY, DOWN_MANY = FloatTile(2, 2, 4, registers=96), FloatTile(4, 4)
GATE_MANY_4BIT, DOWN_MANY_4BIT = FloatTile(2, 2), FloatTile(4, 8, 4, registers=128)


def tile_for(format: str, n: int, max_rows: int, *, gated: bool, on: str) -> FloatTile:
    """The measured cut on a GPU; in the interpreter, which pays for operations, not for numbers, all rows at once."""
    if on == "interpreter":
        height = min(256, backend.next_power_of_2(n))
        return FloatTile(height, 8 * height)
    if max_rows == 1:
        return GATE_ONE if gated else DOWN_ONE
    if format in LAYOUTS and LAYOUTS[format].code_bits == 4:
        return GATE_MANY_4BIT if gated else DOWN_MANY_4BIT
    if format in LAYOUTS and LAYOUTS[format].second == "bias" and gated:
        return replace(GATE_MANY, registers=128)  # at 96 it spills
    return GATE_MANY if gated else DOWN_MANY
