"""transformers, diffusers, accelerate and PEFT: each part is imported when its library is."""
