"""SGLang's own layer classes with qao's operators: see tests/serving/sglang_cases.py."""

from __future__ import annotations

from serving_support import run_cases


def test_layers_of_sglang() -> None:
    assert run_cases("sglang") > 130
