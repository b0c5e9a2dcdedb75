"""SGLang's own layer classes with qao's operators: see the cases tests/serving/sglang_*.py."""

from __future__ import annotations

from serving_support import run_cases


def test_layers_of_sglang() -> None:
    assert run_cases("sglang") > 720
