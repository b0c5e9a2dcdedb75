"""Attributes that users set on layers: kept by quantize_, load and dequantize_, or named in the report."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import qao
import torch
from torch import nn

SCHEME = qao.Int8WeightOnly()


def sizes(layer: Any) -> tuple[int, int]:
    return layer.in_features, layer.out_features


def labeled() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8))
    model[1].weight = model[0].weight
    for number, layer in enumerate(model):
        layer.layer_id = number
        layer.mask = torch.ones(3)
    model[1].sizes = MethodType(sizes, model[1])
    return model


def labels_of(model: nn.Module) -> list[Any]:
    return [(layer.layer_id, layer.mask.tolist()) for layer in model.children()]


def test_they_stay_while_layers_are_replaced(tmp_path: Path) -> None:
    model, expected = labeled(), labels_of(labeled())
    float_names = [set(vars(layer)) for layer in model]
    qao.quantize_(model, SCHEME, embeddings=True)
    assert [type(layer) for layer in model] == [qao.nn.QuantEmbedding, qao.QuantLinear]
    assert labels_of(model) == expected
    assert model[1].sizes.__self__ is model[1] and model[1].sizes() == (16, 8)
    qao.save(model, tmp_path / "m.safetensors")
    loaded = qao.load(tmp_path / "m.safetensors", labeled())
    assert isinstance(loaded[1], qao.QuantLinear) and labels_of(loaded) == expected
    qao.dequantize_(model)
    assert labels_of(model) == expected
    assert model[1].sizes.__self__ is model[1]
    assert [set(vars(layer)) for layer in model] == float_names  # none of the quantized layer's own


@pytest.mark.parametrize("name", ["scheme", "dtype", "packed", "_compiled_call_impl"])
def test_the_report_names_those_of_the_quantized_layer(name: str) -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(16, 8))
    vars(model[0])[name] = "mine"
    rows = qao.quantize_(model, SCHEME).rows
    assert [row.status for row in rows] == ["quantized", "quantized"]
    assert rows[0].note == f"a quantized layer has its own {name}: the float layer's is not kept"
    assert rows[1].note is None
    assert getattr(model[0], name) != "mine"
