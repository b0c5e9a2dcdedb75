"""Context parallelism between processes, and of 32 ranks on a fake process group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks_support import PLACES, Raised, launch

worker = pytest.importorskip("context_parallel_worker")


@pytest.fixture(scope="module", params=PLACES, ids=str)
def raised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Raised]:
    return launch(Path(worker.__file__), tmp_path_factory, request.param, timeout=900)


@pytest.mark.parametrize("name", worker.CASES)
def test_processes(name: str, raised: list[Raised]) -> None:
    assert not any(of_one[name] for of_one in raised), "\n".join(of_one[name] for of_one in raised)


@pytest.mark.extended
def test_one_of_many_ranks_finishes() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(worker.__file__), "fake"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.endswith("finished\n"), done.stderr
