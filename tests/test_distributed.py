"""FSDP2, DDP and distributed checkpoints, between two processes on the CPU; distributed_worker.py has the cases."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import distributed_worker
import pytest
import qao
import torch

WORKER = Path(distributed_worker.__file__)


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each case raised in each process."""
    folder = tmp_path_factory.mktemp("distributed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(qao.__file__).parents[1]), *sys.path])
    logs = [folder / f"{rank}.log" for rank in (0, 1)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, str(WORKER), str(rank), str(folder)]
        with log.open("w") as output:
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", distributed_worker.CASES)
def test_two_processes(name: str, raised: list[dict[str, str]]) -> None:
    if name.startswith("checkpoint"):
        for library in ("transformers", "accelerate"):
            if importlib.util.find_spec(library) is None:
                pytest.skip(f"needs {library}")
    assert [of_one[name] for of_one in raised] == ["", ""], "\n".join(of_one[name] for of_one in raised)


def test_entries_beside_the_tensors_are_on_their_device(device: str) -> None:
    """torch.distributed.checkpoint refuses a state dict on two devices."""
    layer = qao.QuantLinear.from_linear(torch.nn.Linear(64, 32), qao.Int4WeightOnly(group_size=32)).to(device)
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {device}
