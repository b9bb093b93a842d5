"""MoE Lab's kernels: one operation a module, each with a Triton launcher and a torch reference of the same signature.

    backend        which backend serves a tensor, launches and their count, the few operations Triton lacks
    arithmetic     activation layouts and the numeric choices that can be changed one at a time
    quantize_rows  activations to int8: q8_0, q8_1, d4, ds4, d2s6, q8_k
    quantize_fp8   activations to fp8 e4m3, a scale for each 128 values
    dequantize     raw block rows to values (unpack, blocks: where each bit lies; dequantize_steps: each format's step)
    planar         raw blocks to planes and back (planar_layout: what lies where); dequantize_planar: planes to values
    decode         one step of a weight format: raw blocks times q8_1 codes
    gemv           expert rows times raw quantised weights, at most 8 rows sharing one read of the weights
    grouped_gemm   expert rows times weights decoded in registers, on the tensor cores (grouped_gemm_steps: a
                   format's values; grouped_gemm_tiles: the work list; grouped_gemm_operands: weights and checks)
    activation     gated activations
    combine        expert outputs back into token order
    router         rows times the router's weight: logits
    topk           logits to K expert ids and weights a token (score: its arithmetic, router_settings: its host side)
    plan           (token, slot) pairs grouped by expert, on the device
    route_plan     topk and plan of up to 8 tokens in one launch

Importing needs torch alone: without Triton, or without a GPU and outside Triton's interpreter, a launcher says so when
it is called and names the reference that runs anyway.
"""
