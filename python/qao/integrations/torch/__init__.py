"""Hooks for parts of torch that handle quantized layers, each imported after that part of torch."""
