"""Expert rows as q8_1 codes times raw quantised weights: what a decode step runs."""
