"""Tensor parallelism between two processes on the CPU; tensor_parallel_worker.py has the cases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tensor_parallel_worker
from gloo_support import Raised, launch


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> list[Raised]:
    return launch(Path(tensor_parallel_worker.__file__), tmp_path_factory.mktemp("tensor_parallel"))


@pytest.mark.parametrize("name", tensor_parallel_worker.CASES)
def test_two_processes(name: str, raised: list[Raised]) -> None:
    if name.startswith("tp_plan"):
        version = pytest.importorskip("transformers").__version__
        if tuple(map(int, version.split(".")[:2])) < (5, 23):
            pytest.skip("transformers 5.23 and later")
    assert [of_one[name] for of_one in raised] == ["", ""], "\n".join(of_one[name] for of_one in raised)


def test_importing_qao_does_not_import_dtensor() -> None:
    code = "import sys, qao; assert 'torch.distributed.tensor' not in sys.modules; qao.distributed.Colwise"
    subprocess.run([sys.executable, "-c", code], check=True)
