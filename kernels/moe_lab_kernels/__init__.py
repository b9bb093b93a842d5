"""MoE Lab's kernels: one operation a module, each with a Triton launcher and a torch reference of the same signature.

    backend        which backend serves a tensor, launches and their count, the few operations Triton lacks
    quantize_rows  activations to q8_1
    decode         one step of a weight format: raw blocks times q8_1 codes
    gemv           expert rows times raw quantised weights, at most 8 rows sharing one read of the weights
    activation     gated activations
    combine        expert outputs back into token order
    router         rows times the router's weight: logits
    topk           logits to K expert ids and weights a token (score: its arithmetic, router_settings: its host side)
    plan           (token, slot) pairs grouped by expert, on the device
    route_plan     topk and plan of up to 8 tokens in one launch

Importing needs torch alone: without Triton, or without a GPU and outside Triton's interpreter, a launcher says so when
it is called and names the reference that runs anyway.
"""
