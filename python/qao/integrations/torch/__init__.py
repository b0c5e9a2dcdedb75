"""Parts of torch that need to know of quantized layers: each is imported when that part of torch is."""
