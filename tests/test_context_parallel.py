"""Context parallelism on the CPU: two processes, and 32 ranks on a fake process group; all under a watchdog."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gloo_support import Raised, launch

worker = pytest.importorskip("context_parallel_worker")


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> list[Raised]:
    return launch(Path(worker.__file__), tmp_path_factory.mktemp("context_parallel"))


@pytest.mark.parametrize("name", worker.CASES)
def test_two_processes(name: str, raised: list[Raised]) -> None:
    assert [of_one[name] for of_one in raised] == ["", ""], "\n".join(of_one[name] for of_one in raised)


def test_one_of_many_ranks_finishes() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(worker.__file__), "fake"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.endswith("finished\n"), done.stderr
