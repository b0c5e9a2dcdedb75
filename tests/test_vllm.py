"""vLLM's own layer classes with qao's kernels: see the cases tests/serving/vllm_*.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from qao.integrations.vllm import PARTS
from serving_support import passed_cases, run_starts

# First vLLM module to be imported: by users, by its own processes, and importers of modules that qao patches.
_LAYERS = "vllm.model_executor.layers"
FIRST = [
    *("vllm.config", "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.worker_base", *PARTS),
    f"{_LAYERS}.fused_moe.modular_kernel",
    f"{_LAYERS}.quantization.quark.quark_moe",
    f"{_LAYERS}.quantization.compressed_tensors.compressed_tensors",
]
LAST = ["vllm.entrypoints.llm", f"{_LAYERS}.quantization.quark.quark_moe", "vllm.model_executor.model_loader"]
KERNELS = {
    "W4A16": "QaoMixedPrecisionKernel",
    "W8A8": "QaoInt8Kernel",
    "FP8_DYNAMIC": "QaoFp8Kernel",
    "FP8_BLOCK": "QaoFp8BlockKernel",
    "FP8 weights": "QaoFp8WeightOnlyKernel",
    "experts W4A16": "QaoExperts",
    "experts block": "QaoFp8Experts",
}


def test_layers_of_vllm() -> None:
    assert passed_cases("vllm") > 650


@pytest.mark.parametrize(
    ("first", "last"),
    [
        pytest.param(["vllm.entrypoints.llm"], [], id="LLM"),
        *(pytest.param(FIRST[i::4], [], id=f"any {i}", marks=pytest.mark.extended) for i in range(4)),
        pytest.param([], LAST, id="last", marks=pytest.mark.extended),
    ],
)
def test_whatever_is_imported_first(first: list[str], last: list[str], tmp_path: Path) -> None:
    """In fresh processes, with qao found by its entry point as vLLM finds it: its kernels are chosen."""
    cases = [*(f"first {one}" for one in first), *(f"last {one}" for one in last)]
    found = run_starts("vllm", tmp_path, ["never vllm.config", *cases])
    plain = found.pop("never vllm.config")
    for case, one in found.items():
        assert one.get("kernels") == KERNELS and one["failed"] == [], (case, one)
    # The compile cache of vLLM with qao is one, and vLLM's own another.
    keys = {one["key"] for one in found.values()}
    assert len(keys) == 1 and plain["key"] not in keys
