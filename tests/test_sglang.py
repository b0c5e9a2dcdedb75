"""SGLang's own layer classes with qao's operators: see the cases tests/serving/sglang_*.py."""

from __future__ import annotations

from serving_support import passed_cases


def test_layers_of_sglang() -> None:
    assert passed_cases("sglang") > 725
