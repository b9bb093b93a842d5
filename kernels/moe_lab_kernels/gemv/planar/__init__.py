"""Weights in planes: the steps of each format."""
