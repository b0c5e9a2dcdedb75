"""Benchmarks of qao's operators: ``python -m bench --help`` from the root of a checkout."""
