"""Recorded peers of the grouped GEMM on another H200, uniform routing: microseconds of whole layers.

By the kind of what they multiply: "bf16", "fp8" (block-128 weights, fp8 rows), "mxfp4" (bf16 rows). `BEST`: the best
full-layer peer; `VLLM`: vLLM's Triton kernel in bf16.
"""

TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
BEST = {
    ("qwen3-30b-a3b", "bf16"): (29.7, 133, 257, 302, 334, 508, 1211),
    ("mixtral-8x7b", "bf16"): (179, 555, 658, 677, 976, 2582, 8216),
    ("deepseek-v3-like", "bf16"): (177, 1236, 3139, 4925, 5231, 5953, 12690),
    ("gpt-oss-120b-like", "bf16"): (59.0, 371, 894, 1450, 1526, 1744, 3429),
    ("gemma4-26b-a4b-like", "bf16"): (35.5, 163, 317, 384, 415, 649, 1526),
    ("qwen3-30b-a3b", "fp8"): (26.5, 90.0, 155, 179, 230, 409, 941),
    ("mixtral-8x7b", "fp8"): (122, 311, 371, 404, 662, 1585, 5247),
    ("deepseek-v3-like", "fp8"): (105, 650, 1657, 2636, 2989, 3964, 7708),
    ("qwen3-30b-a3b", "mxfp4"): (31.5, 78.7, 136, 170, 305, 719, 1993),
    ("mixtral-8x7b", "mxfp4"): (96.4, 254, 301, 442, 1015, 2771, 10100),
    ("deepseek-v3-like", "mxfp4"): (95.0, 511, 1429, 2134, 2926, 5285, 14502),
    ("gpt-oss-120b-like", "mxfp4"): (48.3, 175, 447, 717, 980, 1621, 4009),
    ("gemma4-26b-a4b-like", "mxfp4"): (35.8, 90.8, 164, 206, 368, 925, 2633),
}
VLLM = {
    "qwen3-30b-a3b": (29.7, 133, 257, 302, 334, 508, 1435),
    "mixtral-8x7b": (179, 555, 658, 677, 1035, 2746, 10371),
    "deepseek-v3-like": (177, 1236, 3139, 4925, 5231, 5953, 14132),
    "gpt-oss-120b-like": (59.0, 371, 894, 1450, 1526, 1744, 3812),
    "gemma4-26b-a4b-like": (35.5, 163, 317, 384, 415, 649, 1885),
}


def kind_of(format: str) -> str:
    """Which peers a format is held against: k-quants and everything else that becomes bf16 against bf16."""
    return "fp8" if format.endswith("@fp8") else "mxfp4" if format.startswith("mxfp4") else "bf16"


def peers_us(shape: str, format: str, tokens: int) -> tuple[float | None, float | None]:
    """(the best peer of the format's kind, vLLM's bf16 kernel), None where nothing is recorded."""
    if tokens not in TOKENS:
        return None, None
    at = TOKENS.index(tokens)
    best, vllm = BEST.get((shape, kind_of(format))), VLLM.get(shape)
    return best and best[at], vllm and vllm[at]
