"""MoE Lab's kernels: one operation a module, each with a Triton launcher and a torch reference of the same signature.

    backend, checks, primitives   who serves a tensor, launches and their count; refusals; device code that all share
    storage      block sizes, where each bit lies, planes, separate scales, small floats
    route        logits, top-K ids and weights, pairs grouped by expert
    slots        from a plan and a slot table to chunks by arena slot; slots by address
    rows         activations to codes, gated activations, expert outputs back into token order
    dequantize   stored weights to values
    gemv         rows as q8_1 codes times raw blocks, at most 8 rows sharing one read of the weights
    gemv_float   the same for rows as they come, in every format
    grouped      rows times weights decoded in registers, on the tensor cores
    mmq          rows as int8 codes times raw blocks on the tensor cores
    launch       how programs are cut on this device: measured tables; launches compiled ahead

A folder's `operands` holds its checks, `steps` what a format contributes, `tiles` how programs are cut, `ref` the
reference where it needs a file of its own. Importing needs torch alone: without Triton, or without a GPU and outside
Triton's interpreter, a launcher says so when it is called and names the reference that runs anyway.
"""
