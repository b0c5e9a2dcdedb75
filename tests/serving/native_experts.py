"""Experts of checkpoints in qao's own format, for any engine: files and expected results."""

from __future__ import annotations

import json
from typing import Any

import qao
import torch
from experts_support import SCHEMES
from fused_support import DTYPE, PREFIX, WIDTH, E, K, check, check_rounded
from native import activation, exact
from qao.nn.experts import QuantProjection, quantize_projection
from qao.schemes import Scheme
from torch import Tensor

EXPERT_SCHEMES = [
    *SCHEMES,
    qao.Int4WeightOnly(group_size=128, symmetric=True),
    qao.Fp4WeightOnly("nvfp4"),
    qao.Float8WeightOnly("tensor"),
    qao.Float8DynamicActivationFloat8Weight("block"),
    qao.Float8StaticActivationFloat8Weight(activation_scale=0.05),
    qao.Int8DynamicActivationInt8Weight(rotation=64),
]


def checkpoint(
    scheme: Scheme, spread: float = 0.1, gpt_oss: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor], list[dict[str, Tensor]]]:
    """The files that qao writes for a layer's experts: config, tensors by name, and their float64 values.

    Args:
        spread: of the weights.
        gpt_oss: rows of gate and up alternate, and there are biases.
    """
    tensors, whole = {}, {}
    for key, n, k in (("up", 2 * WIDTH, K), ("down", K, WIDTH)):
        packed = quantize_projection(torch.randn(E, n, k, dtype=DTYPE) * spread, scheme, False, None, key)
        bias = torch.randn(E, n, dtype=DTYPE) if gpt_oss else None
        made = QuantProjection(E, n, k, scheme, packed, bias, DTYPE)
        tensors |= {f"{PREFIX}.{key}.{name}": one for name, one in made.state_dict().items()}
        whole[key] = made.dequantize(torch.float64), bias
    layers = {f"{PREFIX}.{key}": exact(scheme.fitted(k)) for key, k in (("up", K), ("down", WIDTH))}
    each = [
        _expert({key: [part[number] for part in one if part is not None] for key, one in whole.items()}, gpt_oss)
        for number in range(E)
    ]
    return json.loads(json.dumps(qao.QaoConfig(layers=layers, dtype=DTYPE).to_dict())), tensors, each


def _expert(parts: dict[str, list[Tensor]], interleaved: bool) -> dict[str, Tensor]:
    """Weights and biases by the names that ``expected`` has for them."""
    made = {}
    for letter, up, down in zip("wb", parts["up"], parts["down"], strict=False):
        gate_and_up = (up[::2], up[1::2]) if interleaved else up.chunk(2)
        made |= dict(zip((f"{letter}1", f"{letter}3", f"{letter}2"), (*gate_and_up, down), strict=True))
    return made


def check_parts(
    parts: list[Tensor], scheme: Scheme, dense: list[dict[str, Tensor]], given: tuple[Tensor, Tensor, Tensor]
) -> None:
    """The sum of the results of processes that each have a part of every expert."""
    what, y = activation(scheme), torch.stack(parts).sum(0)
    if scheme.activations == "float":
        check(y, dense, *given)
    else:
        same = not scheme.rotation and (len(parts) == 1 or what.group_size in (0, 128))
        check_rounded(y, dense, given, lambda row: what.seen(row[None].to(DTYPE))[0].double(), same=same)
