"""Weight quantization by format: round-to-nearest with a search for scales."""
