"""How the float GEMV's programs are cut, and which cut was fastest where. No tile changes a bit."""

from dataclasses import dataclass

import torch

from moe_lab_kernels import backend


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


# H200, triton 3.6, microseconds; all rows in benchmarks/results/h200/float_decode_timings_tiles.csv. A multiprocessor
# holds 25 warps of 80 registers, 21 of 96, 16 of 128.
# T = 1, gate and up; rows of each a program, registers (qwen3: int4_g64, fp8_block; gpt-oss: int8_g64, mxfp4_oss):
#   2, any    9.8   10.0   23.4   16.9
#   2, 80     8.4    9.3   22.2   17.4     qwen3's 3,072 programs all find a place
#   4, 128    9.1   10.2   23.6   17.2
#   4, two warps of two rows: 11.7, 13.5, 30.1, 23.9
GATE_ONE = FloatTile(2, 2, registers=80)
# T = 1, down:
#   4, any    8.1    6.2   13.0   10.8
#   4, 80     6.9    6.9   12.0    8.9     gpt-oss's 2,880 programs all find a place, qwen3's 4,096 do not
#   8, 128    5.2    5.5   13.0   10.3     qwen3's 2,048 do
DOWN_ONE, DOWN_ONE_TALL = FloatTile(4, 4, registers=80), FloatTile(8, 8, registers=128)
PLACES = 25
# T = 8, gate and up; rows, sums, rows of a chunk together, registers (last: qwen3 bf16):
#   2 2 4  96    67.1   51.2   210    118
#   2 2 2  96    53.4   50.2   173    111
#   2 2 1  80    43.9   47.0   136    109     91.6
#   4 4 1 128    43.7                         94.3
#   2 4 2  96    42.2   45.8   140    107     80.9
GATE_MANY = FloatTile(2, 4, 2, registers=96)
# T = 8, down, chunks of 1.1 (gpt-oss) and 1.25 rows (qwen3); with two rows a chunk (mixtral) decoding is worth sharing:
#   4 4 4  96    45.8   39.8   83.5   58.6
#   4 4 2  96    37.7   37.9   76.6   55.4
#   4 8 2 128    35.8   37.6   74.4   54.9    47.4
#   4 4 1  80    36.0   36.1   73.1   56.1    41.4
#   8 8 1 128    31.6                         42.1
DOWN_MANY, DOWN_MANY_FULL = FloatTile(8, 8, 1, registers=128), FloatTile(4, 8, 2, registers=128)
NO_TALL = ("iq4_nl",)  # eight rows of it spill at 128 registers


def tile_for(
    format: str, n: int, chunks: int, pairs: int, max_rows: int, *, gated: bool, on: str, device: torch.device
) -> FloatTile:
    """The measured cut of n weight rows for so many chunks of so many pairs; in the interpreter, which pays for
    operations, not for numbers, all rows at once."""
    if on == "interpreter":
        height = min(256, backend.next_power_of_2(n))
        return FloatTile(height, 8 * height)
    if gated:
        return GATE_ONE if max_rows == 1 else GATE_MANY
    if max_rows > 1:
        return DOWN_MANY_FULL if pairs >= 2 * chunks or format in NO_TALL else DOWN_MANY
    held = chunks * -(-n // DOWN_ONE.rows) <= PLACES * backend.processors(device)
    return DOWN_ONE if held or format in NO_TALL else DOWN_ONE_TALL
