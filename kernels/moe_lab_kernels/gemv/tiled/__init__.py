"""Weights in tiles of 16 rows, on the tensor cores."""
