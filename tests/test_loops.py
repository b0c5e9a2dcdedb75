"""Training loops around quantized models: averages, optimizers, Trainer, accelerate, processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import qao
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

SCHEMES = [
    qao.Int4WeightOnly(group_size=32),
    qao.Int8WeightOnly(),
    qao.Fp4WeightOnly(),
    qao.Float8WeightOnly(),
    qao.Int8DynamicActivationInt8Weight(symmetric_activations=False),
    qao.Float8DynamicActivationFloat8Weight(),
]


def make(scheme: qao.Scheme, device: str = "cpu") -> nn.Sequential:
    """Two frozen quantized layers around a norm that is trained, and a float head."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64), nn.Linear(64, 8)).to(device)
    qao.quantize_(model, {"3": None, "re:.*": scheme}, progress=False)
    return model


def packed(model: nn.Module) -> dict[str, Tensor]:
    names = ("qweight", "scales", "weight_sums", "activation_scale")
    return {name: value.clone() for name, value in model.state_dict().items() if name.rpartition(".")[2] in names}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() and found
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


AVERAGES: dict[str, dict[str, Any]] = {
    "swa": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "function": {"avg_fn": lambda averaged, model, count: 0.7 * averaged + 0.3 * model},
    "buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_averaged_models_keep_their_codes(scheme: qao.Scheme, kind: str, device: str) -> None:
    model = make(scheme, device)
    codes, first = packed(model), model[3].weight.detach().clone()
    averaged = AveragedModel(model, **AVERAGES[kind])
    averaged.update_parameters(model)
    with torch.no_grad():
        model[3].weight.add_(1.0)
    averaged.update_parameters(model)
    assert_same(packed(averaged.module), codes)
    assert_same(packed(model), codes)
    share = {"swa": 0.5, "ema": 0.1, "function": 0.3, "buffers": 0.1}[kind]
    assert torch.allclose(averaged.module[3].weight, first + share, atol=1e-6)
    assert all("parameters" not in vars(module) for module in (model, averaged, averaged.module))


def test_averages_of_other_codes_are_refused() -> None:
    model, other = make(SCHEMES[0]), make(SCHEMES[0])
    averaged = AveragedModel(other, **AVERAGES["ema"])
    new = {name: 0.5 * value for name, value in qao.dequantize_(copy.deepcopy(model)).state_dict().items()}
    qao.update_(model, new)
    averaged.update_parameters(model)  # the first only copies
    assert_same(packed(averaged.module), packed(model))
    with pytest.raises(ValueError, match=r"AveragedModel: 0\.qweight has changed.* packed weights have no average"):
        averaged.update_parameters(make(SCHEMES[0]))
    assert_same(packed(averaged.module), packed(model))
    floats = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64), nn.Linear(64, 8))
    averaged = AveragedModel(floats)
    with pytest.raises(ValueError, match=r"AveragedModel: 0\.qweight is quantized in one of the two"):
        averaged.update_parameters(model)
