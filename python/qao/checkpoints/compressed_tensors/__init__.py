"""The compressed-tensors layout of llm-compressor and vLLM: config, reader and writer."""
