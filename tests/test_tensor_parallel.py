"""Tensor parallelism between processes; tensor_parallel_worker.py has the cases."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import qao
import tensor_parallel_worker
import torch
import torch.distributed as dist
from qao.distributed import Colwise, Rowwise
from ranks_support import PLACES, Raised, launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture(scope="module", params=PLACES, ids=str)
def raised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Raised]:
    return launch(Path(tensor_parallel_worker.__file__), tmp_path_factory, request.param)


@pytest.mark.parametrize("name", tensor_parallel_worker.CASES)
def test_processes(name: str, raised: list[Raised]) -> None:
    if name.startswith("tp_plan"):
        version = pytest.importorskip("transformers").__version__
        if tuple(map(int, version.split(".")[:2])) < (5, 23):
            pytest.skip("transformers 5.23 and later")
    assert not any(of_one[name] for of_one in raised), "\n".join(of_one[name] for of_one in raised)


@pytest.mark.parametrize("world", [1, 3, 4, 5])
@pytest.mark.parametrize("name", tensor_parallel_worker.SCHEMES)
def test_parts_of_any_number_of_ranks_are_the_whole(name: str, world: int) -> None:
    """Rank after rank on torch's fake process group: codes and scales of all parts, side by side."""
    scheme = tensor_parallel_worker.SCHEMES[name]
    k = {1: 384, 3: 384, 4: 512, 5: 640}[world]  # whole blocks of 128 for each rank
    torch.manual_seed(0)
    whole = qao.QuantLinear.from_linear(nn.Linear(k, k), scheme)
    rows, columns = [], []
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (world,))
            for style, parts in ((Colwise(), rows), (Rowwise(), columns)):
                parts.append(parallelize_module(copy.deepcopy(whole), mesh, style, src_data_rank=None))
        finally:
            dist.destroy_process_group()
    assert [layer.out_features for layer in rows] == [k // world] * world
    assert torch.equal(torch.cat([layer.dequantize() for layer in rows]), whole.dequantize())
    assert torch.equal(torch.cat([layer.dequantize() for layer in columns], 1), whole.dequantize())
    assert torch.equal(torch.cat([layer.bias for layer in rows]), whole.bias)
    assert all(torch.equal(layer.bias, whole.bias) for layer in columns)
    if whole.weight_sums is not None:
        assert torch.equal(torch.cat([layer.weight_sums for layer in rows]), whole.weight_sums)
        torch.testing.assert_close(sum(layer.weight_sums for layer in columns), whole.weight_sums)


def test_importing_qao_does_not_import_dtensor() -> None:
    code = "import sys, qao; assert 'torch.distributed.tensor' not in sys.modules; qao.distributed.Colwise"
    subprocess.run([sys.executable, "-c", code], check=True)
