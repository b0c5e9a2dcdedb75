"""Layers of checkpoints in qao's own format, for any engine: files and expected results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import qao
import torch
from accuracy import check_close
from loaded import KINDS, K, Layer
from ops_schemes import Activation
from qao.schemes import Scheme
from torch import Tensor, nn

DTYPE = torch.bfloat16


def activation(scheme: Scheme) -> Activation:
    if scheme.activations == "int8":
        return Activation("int8", symmetric=scheme.symmetric_activations)
    if scheme.activations == "float":
        return Activation()
    if scheme.weights == "int4":
        return Activation("fp8", beside_int4=True)
    group_size, *_ = scheme.options(1) or (-1,)
    return Activation("fp8", group_size=group_size, static_scale=scheme.activation_scale)


def exact(scheme: Scheme) -> Scheme:
    """The scheme as a checkpoint of a model in DTYPE states it."""
    return replace(scheme, scale_dtype=scheme.scale_dtype or DTYPE) if scheme.weights == "int4" else scheme


def checkpoint(kind: str, scheme: Scheme) -> tuple[dict[str, Any], list[dict[str, Tensor]], list[Tensor]]:
    """The files that qao writes for these layers: config, tensors of each matrix, and their float64 values."""
    layers, states, dense = {}, [], []
    for name, _, rows in KINDS[kind]:
        linear = nn.Linear(K, rows, bias=kind != "row", dtype=DTYPE)
        made = qao.QuantLinear.from_linear(linear, scheme)
        layers[name] = exact(scheme)
        states.append(made.state_dict())
        dense.append(made.dequantize(torch.float64))
    return json.loads(json.dumps(qao.QaoConfig(layers=layers, dtype=DTYPE).to_dict())), states, dense


# Kinds that a model may have joined itself, and in how many processes.
JOINED_CASES = [("qkv", 2), ("gate_up", 1), ("gate_up", 2)]


def joined(kind: str, scheme: Scheme) -> tuple[dict[str, Any], list[dict[str, Tensor]], list[Tensor], list[Tensor]]:
    """As ``checkpoint``, of a model with one linear layer for them all, as Phi-3 is; and the parts of its bias."""
    rows = [rows for _, _, rows in KINDS[kind]]
    made = qao.QuantLinear.from_linear(nn.Linear(K, sum(rows), dtype=DTYPE), scheme)
    name = f"{KINDS[kind][0][0].rpartition('.')[0]}.{kind}_proj"
    content = json.loads(json.dumps(qao.QaoConfig(layers={name: exact(scheme)}, dtype=DTYPE).to_dict()))
    state = made.state_dict()
    return content, [state], list(made.dequantize(torch.float64).split(rows)), list(state["bias"].split(rows))


def check(loaded: Layer, scheme: Scheme, states: list[dict[str, Tensor]], dense: list[Tensor]) -> None:
    """The layer multiplies its share of the weights ``dense``."""
    names = {name for name, _ in loaded.layer.named_parameters()}
    assert names <= {"qweight", "scales", "weight_sums", "activation_scale", "bias"}
    part, what = loaded.part_of(dense), activation(scheme)
    bias = None if loaded.kind == "row" else loaded.part_of([state["bias"] for state in states])
    for tokens in (1, 5, 40):
        x = torch.randn(tokens, K, dtype=DTYPE)
        own = x[:, loaded.columns()].contiguous()
        check_close(loaded(x), own, part, bias, what.seen(own), what.slack(own, part))


def check_joined(load: Callable[..., Layer], kind: str, size: int, scheme: Scheme) -> None:
    """``check`` on each of ``size`` ranks, loading a layer that the checkpoint stores joined."""
    torch.manual_seed(size)
    content, states, dense, biases = joined(kind, scheme)
    parts = [{"bias": bias} for bias in biases]
    for rank in range(size):
        check(load(kind, content, states, rank, size), scheme, parts, dense)
