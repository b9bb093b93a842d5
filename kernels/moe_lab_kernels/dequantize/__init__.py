"""Stored weights to plain values."""
