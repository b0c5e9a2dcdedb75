"""What every function says that gets no model: a pipeline, a name, a state dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qao
import torch
from torch import nn

SCHEME = qao.Int8WeightOnly()
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "quantize_": lambda model: qao.quantize_(model, SCHEME),
    "dequantize_": qao.dequantize_,
    "calibrate": lambda model: qao.calibrate(model, SCHEME, [torch.ones(1, 4)]),
    "save": lambda model: qao.save(model, "/nowhere/x.safetensors"),
    "load": lambda model: qao.load("/nowhere/x.safetensors", model),
    "explain": lambda model: qao.explain(model, torch.ones(1, 4)),
    "update_": lambda model: qao.update_(model, {}),
}


class Pipeline:
    def __init__(self) -> None:
        self.transformer, self.vae, self.steps = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4), 3


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_pipeline_is_refused_with_the_names_of_its_models(function: str) -> None:
    pipe = Pipeline()
    with pytest.raises(TypeError, match=rf"{function}: .* not Pipeline\. Pass .*: \.transformer, \.vae\."):
        FUNCTIONS[function](pipe)
    assert type(pipe.transformer[0]) is nn.Linear
    for other in ("owner/name", {"weight": torch.ones(4, 4)}):
        with pytest.raises(TypeError, match=rf"{function}: .* not {type(other).__name__}\. Load the model first"):
            FUNCTIONS[function](other)
