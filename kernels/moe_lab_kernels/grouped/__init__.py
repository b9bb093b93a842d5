"""Expert rows times weights decoded in registers, on the tensor cores: what a prefill step runs."""
