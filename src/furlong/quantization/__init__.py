"""Quantized weights: pure functions from a weight to its stored tensors and back, one file per format."""
