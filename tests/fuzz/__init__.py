"""Fuzzers of operators, checkpoint readers and layers: ``python -m fuzz`` (CONTRIBUTING.md)."""
