"""The layout of compressed-tensors, which llm-compressor and vLLM share: its config, reading and writing it."""
