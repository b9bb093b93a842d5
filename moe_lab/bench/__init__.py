"""Measuring: the fixed workloads, and the clock that every benchmark uses."""
