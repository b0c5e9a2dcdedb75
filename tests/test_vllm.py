"""vLLM's own layer classes with qao's kernels: see tests/serving/vllm_cases.py and vllm_native_cases.py."""

from __future__ import annotations

from serving_support import run_cases


def test_layers_of_vllm() -> None:
    assert run_cases("vllm") > 630
