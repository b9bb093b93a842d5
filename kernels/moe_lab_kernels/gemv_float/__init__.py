"""Expert rows as they come (fp32, fp16, bf16, fp8) times weights of every format, for one to eight rows a chunk."""
