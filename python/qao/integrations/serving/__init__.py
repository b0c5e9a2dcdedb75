"""Code shared by the vLLM and SGLang integrations."""
