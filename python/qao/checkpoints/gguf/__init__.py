"""GGUF, the format of llama.cpp: the file, its model, its tensors as qao's layers."""
