"""FSDP2, DDP and distributed checkpoints between processes; distributed_worker.py has the cases."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import distributed_worker
import pytest
import qao
import torch
from ranks_support import PLACES, Raised, launch


@pytest.fixture(scope="module", params=PLACES, ids=str)
def raised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Raised]:
    """What each case raised in each process."""
    return launch(Path(distributed_worker.__file__), tmp_path_factory, request.param)


@pytest.mark.parametrize("name", distributed_worker.CASES)
def test_processes(name: str, raised: list[Raised]) -> None:
    if name.startswith("checkpoint"):
        for library in ("transformers", "accelerate", *(["peft"] if "lora" in name else [])):
            if importlib.util.find_spec(library) is None:
                pytest.skip(f"needs {library}")
    assert not any(of_one[name] for of_one in raised), "\n".join(of_one[name] for of_one in raised)


def test_entries_beside_the_tensors_are_on_their_device(device: str) -> None:
    """torch.distributed.checkpoint refuses a state dict on two devices."""
    layer = qao.QuantLinear.from_linear(torch.nn.Linear(64, 32), qao.Int4WeightOnly(group_size=32)).to(device)
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {device}
