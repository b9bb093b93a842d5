"""GGUF k-quants: super-blocks of 256 values, in sub-blocks of 16 (q2_k, q3_k, q6_k) or 32 (q4_k, q5_k).

    q2_k  84 bytes, 2.625 bits a weight     scales u8 @0..15 (low nibble scale, high nibble min), 2-bit codes @16..79,
                                            d f16 @80, dmin f16 @82; w = d * sc * q - dmin * m
    q3_k  110 bytes, 3.4375 bits            third bits @0..31, low two @32..95, sixteen 6-bit scales @96..107,
                                            d f16 @108; w = d * (sc - 32) * (q - 4)
    q4_k  144 bytes, 4.5 bits               d f16 @0, dmin f16 @2, eight 6-bit scales and mins @4..15, codes @16..143;
                                            w = d * sc * q - dmin * m
    q5_k  176 bytes, 5.5 bits               as q4_k, with fifth bits @16..47 and low nibbles @48..175
    q6_k  210 bytes, 6.5625 bits            low nibbles @0..127, high two bits @128..191, int8 scales @192..207,
                                            d f16 @208; w = d * sc * (q - 32)
Which bit belongs to which value: `moe_lab_kernels.storage.unpack`. Bit-equal with ggml both ways (tests/oracles).
"""

from moe_lab.formats.gguf_blocks import GgufBlocks
from moe_lab.formats.quantize_min import quantize_q2_k, quantize_q4_k, quantize_q5_k
from moe_lab.formats.quantize_symmetric import quantize_q3_k, quantize_q6_k

Q2_K_FORMAT, Q3_K_FORMAT = GgufBlocks("q2_k", 10, quantize_q2_k), GgufBlocks("q3_k", 11, quantize_q3_k)
Q4_K_FORMAT, Q5_K_FORMAT = GgufBlocks("q4_k", 12, quantize_q4_k), GgufBlocks("q5_k", 13, quantize_q5_k)
Q6_K_FORMAT = GgufBlocks("q6_k", 14, quantize_q6_k)
