"""The tensor types a GGUF file may name: number, name, values a block, bytes a block.

Sizes are here for every type that is in use, also those without a decoder, so that any tensor's extent can be checked.
Numbers missing from the table (4, 5, 31-33, 36-38) were withdrawn and have no size any more.
Source of the numbers: the format's type enumeration and its block structs.
"""

from typing import NamedTuple


class GgmlType(NamedTuple):
    """One storage type. A row of Kd values takes Kd / block * block_bytes bytes."""

    number: int
    name: str
    block: int
    block_bytes: int


_ROWS = (
    (0, "f32", 1, 4), (1, "f16", 1, 2), (30, "bf16", 1, 2), (28, "f64", 1, 8),
    (24, "i8", 1, 1), (25, "i16", 1, 2), (26, "i32", 1, 4), (27, "i64", 1, 8),
    (2, "q4_0", 32, 18), (3, "q4_1", 32, 20), (6, "q5_0", 32, 22), (7, "q5_1", 32, 24), (8, "q8_0", 32, 34),
    (9, "q8_1", 32, 36),
    (10, "q2_k", 256, 84), (11, "q3_k", 256, 110), (12, "q4_k", 256, 144), (13, "q5_k", 256, 176),
    (14, "q6_k", 256, 210), (15, "q8_k", 256, 292),
    (16, "iq2_xxs", 256, 66), (17, "iq2_xs", 256, 74), (22, "iq2_s", 256, 82), (18, "iq3_xxs", 256, 98),
    (21, "iq3_s", 256, 110),
    (19, "iq1_s", 256, 50), (29, "iq1_m", 256, 56), (20, "iq4_nl", 32, 18), (23, "iq4_xs", 256, 136),
    (34, "tq1_0", 256, 54), (35, "tq2_0", 256, 66), (39, "mxfp4", 32, 17), (40, "nvfp4", 64, 36),
    (41, "q1_0", 128, 18), (42, "q2_0", 64, 18),
)  # fmt: skip

GGML_TYPES: dict[int, GgmlType] = {row[0]: GgmlType(*row) for row in _ROWS}
GGML_BY_NAME: dict[str, GgmlType] = {t.name: t for t in GGML_TYPES.values()}

# `general.file_type`, the label a file was made under -> the type it promises for most tensors. Single tensors may and
# do differ: rows that are no multiple of 256 fall back to other types under the same label.
FILE_TYPES: dict[int, str] = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 7: "q8_0", 8: "q5_0", 9: "q5_1", 10: "q2_k", 11: "q3_k", 12: "q3_k",
    13: "q3_k", 14: "q4_k", 15: "q4_k", 16: "q5_k", 17: "q5_k", 18: "q6_k", 19: "iq2_xxs", 20: "iq2_xs", 21: "q2_k",
    22: "iq3_s", 23: "iq3_xxs", 24: "iq1_s", 25: "iq4_nl", 26: "iq3_s", 27: "iq3_s", 28: "iq2_xs", 29: "iq2_s",
    30: "iq4_xs", 31: "iq1_m", 32: "bf16", 36: "tq1_0", 37: "tq2_0", 38: "mxfp4", 39: "nvfp4", 40: "q1_0",
}  # fmt: skip
