"""GGUF's simple blocks: 32 values (nvfp4: 64) under their own scales, and IQ4's uneven tables.

    q8_0    34 bytes, 8.5 bits a weight    d f16 @0, codes int8 @2..33; w = d * q
    q4_0    18 bytes, 4.5 bits             d f16 @0, codes @2..17; w = d * (q - 8)
    q4_1    20 bytes, 5 bits               d f16 @0, m f16 @2, codes @4..19; w = d * q + m
    q5_0    22 bytes, 5.5 bits             d f16 @0, fifth bits @2..5, low nibbles @6..21; w = d * (q - 16)
    q5_1    24 bytes, 6 bits               d f16 @0, m f16 @2, fifth bits @4..7, low nibbles @8..23; w = d * q + m
    mxfp4   17 bytes, 4.25 bits            exponent u8 @0, E2M1 codes @1..16; w = 2 v(q) * 2^(exponent - 128)
    nvfp4   36 bytes, 4.5 bits             four E4M3 scales u8 @0..3, E2M1 codes @4..35; w = v(q) * scale, for each 16
    iq4_nl  18 bytes, 4.5 bits             d f16 @0, codes @2..17; w = d * t(q)
    iq4_xs  136 bytes for 256, 4.25 bits   d f16 @0, eight 6-bit scales @2..7, codes @8..135; w = d * (sc - 32) * t(q)
q4_1, q5_0, q5_1 and iq4_* (t: a table of 16 int8) are only decoded. Here mxfp4 and nvfp4 are the GGUF blocks with the
values ggml reads: an exponent of 255 is 2^127 and no NaN; a scale's sign bit is ignored and 0x7f is 0; a tensor's own
fp32 scale, where a file has one, is a separate tensor. Which bit belongs to which value:
`moe_lab_kernels.storage.unpack`.
"""

from moe_lab.formats.gguf_blocks import GgufBlocks, TableBlocks
from moe_lab.formats.quantize_fp4 import quantize_mxfp4, quantize_nvfp4
from moe_lab.formats.quantize_simple import quantize_q4_0, quantize_q8_0

Q8_0_FORMAT, Q4_0_FORMAT = GgufBlocks("q8_0", 8, quantize_q8_0), GgufBlocks("q4_0", 2, quantize_q4_0)
Q4_1_FORMAT, Q5_0_FORMAT, Q5_1_FORMAT = GgufBlocks("q4_1", 3), GgufBlocks("q5_0", 6), GgufBlocks("q5_1", 7)
IQ4_NL_FORMAT, IQ4_XS_FORMAT = TableBlocks("iq4_nl", 20), TableBlocks("iq4_xs", 23)
MXFP4_FORMAT = GgufBlocks("mxfp4", 39, quantize_mxfp4)
NVFP4_FORMAT = GgufBlocks("nvfp4", 40, quantize_nvfp4, largest=6.0 * 448.0)  # E2M1's largest times E4M3's
