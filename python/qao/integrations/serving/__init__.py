"""What qao does alike in vLLM and SGLang."""
