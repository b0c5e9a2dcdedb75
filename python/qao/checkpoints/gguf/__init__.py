"""GGUF, the format of llama.cpp: file container, model metadata, and tensors as quantized layers."""
