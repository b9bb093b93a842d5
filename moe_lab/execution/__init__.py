"""One call of a layer: its options, its arms, device routing, the shared expert's lane, capture into a CUDA graph."""
