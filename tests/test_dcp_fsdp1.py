"""torch's distributed checkpoints and FSDP1: errors before anything changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import qao
import torch
import torch.distributed.checkpoint as dcp
from one_layer import INT4, X, of, quantized, unchanged
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


@pytest.mark.parametrize("options", [{}, {"use_orig_params": True}, {"ignored_modules": [nn.Linear(1, 1)]}], ids=str)
def test_fsdp1_names_fsdp2(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), quantized(7))
    with pytest.raises(
        TypeError, match=r"FullyShardedDataParallel: 1\.0 is a QuantLinear.*fully_shard.*ignored_modules"
    ):
        FullyShardedDataParallel(model, **options)
    assert type(model[0]) is nn.Linear


@pytest.mark.filterwarnings("ignore:torch.distributed is ")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("scheme", [INT4, qao.Int8WeightOnly()], ids=str)
def test_dcp_load_checks_sizes_before_it_writes(scheme: qao.Scheme, nested: bool, tmp_path: Path) -> None:
    def state(model: nn.Module) -> dict[str, Any]:
        return {"model": model.state_dict(), "step": 3} if nested else model.state_dict()

    saved, alike, other = quantized(4, scheme), quantized(4, scheme, seed=1), quantized(7, scheme, seed=1)
    dcp.save(state(saved), checkpoint_id=tmp_path)
    dcp.load(state(alike), checkpoint_id=tmp_path)
    assert torch.equal(alike(X), saved(X))
    before = of(other)
    with pytest.raises(
        ValueError, match=r"0\.pip_install_qao: the checkpoint holds a weight \[4, 64\], but .* \[7, 64\]"
    ):
        dcp.load(state(other), checkpoint_id=tmp_path)
    assert unchanged(other, before)


@pytest.mark.filterwarnings("ignore:torch.distributed is ")
def test_dcp_load_into_empty_tensors(tmp_path: Path) -> None:
    """They may hold bytes of any other layer's marker."""
    saved, other = quantized(4), quantized(7)
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path)
    state = {name: torch.empty_like(tensor) for name, tensor in saved.state_dict().items()}
    state["0.pip_install_qao"] = other.state_dict()["0.pip_install_qao"].clone()
    dcp.load(state, checkpoint_id=tmp_path)
    model = quantized(4, seed=1)
    model.load_state_dict(state)
    assert torch.equal(model(X), saved(X))
