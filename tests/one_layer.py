"""Models of one quantized layer, and whether they changed."""

from __future__ import annotations

import qao
import torch
from torch import Tensor, nn

INT4 = qao.Int4WeightOnly(group_size=32)
X = torch.linspace(-1, 1, 128).view(2, 64)


def quantized(n: int, scheme: qao.Scheme = INT4, bias: bool = False, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, n, bias=bias))
    qao.quantize_(model, scheme, progress=False)
    return model


def of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_parameters()}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    now = dict(model.named_parameters())
    same = now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in before)
    return same and not any(module._forward_pre_hooks for module in model.modules())
