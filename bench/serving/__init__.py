"""Benchmark of serving engines on quantized checkpoints, with and without qao."""
