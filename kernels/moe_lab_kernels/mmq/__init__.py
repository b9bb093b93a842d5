"""Expert rows as int8 codes times raw blocks on the tensor cores, in the arithmetic of ggml's prefill kernels."""
