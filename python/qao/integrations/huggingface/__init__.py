"""Integrations with transformers, diffusers, accelerate and PEFT, each imported after its library."""
