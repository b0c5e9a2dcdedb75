"""The walk of quantize_: it meets each module once, and records what later steps need."""

from __future__ import annotations

import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from qao.quantization.quantize import plan
from qao.quantization.walk import walk
from torch import Tensor, nn

HERE = str(Path(qao.__file__).parent)
INT8 = qao.Int8WeightOnly()

# Models here are so small that every weight in them is a big one.
pytestmark = pytest.mark.filterwarnings("ignore:quantize_. these big weights stay")


class Model(nn.Module):
    """A tied head, a router, a layer in two places, and a big weight of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.gate = nn.Linear(8, 2)
        self.conv = nn.Conv1d(8, 8, 3)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.body[0]

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.head(self.again(self.body(self.embed(ids))))
        return x


def tiny(kind: str) -> Any:
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


class Questions:
    """Calls of qao's functions from another file with one module, and of torch's functions that walk the model."""

    def __init__(self, model: nn.Module, module: nn.Module) -> None:
        self.model, self.module = model, module
        self.asked: Counter[str] = Counter()
        self.walks: set[types.FrameType] = set()  # frames, because a generator is entered again for each item

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or caller is None:
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if code.co_filename.startswith(HERE):
            crosses = caller.f_code.co_filename != code.co_filename and not code.co_name.startswith("<")
            if crosses and any(frame.f_locals.get(name) is self.module for name in names):
                self.asked[code.co_name] += 1
        elif caller.f_code.co_filename.startswith(HERE) and code.co_name in ("modules", "named_modules"):
            if frame.f_locals.get("self") is self.model:
                self.walks.add(frame)


@pytest.mark.parametrize("scheme", [INT8, {"re:.*": INT8}], ids=["one", "dict"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Model, "body.0"),
        (Model, "gate"),
        (Model, "embed"),
        (lambda: tiny("Llama"), "model.layers.0.self_attn.q_proj"),
        (lambda: tiny("Mixtral"), "model.layers.0.self_attn.q_proj"),
    ],
)
def test_each_module_is_met_once(make: Any, name: str, scheme: Any) -> None:
    model = make()
    questions = Questions(model, model.get_submodule(name))
    before = sys.getprofile()
    sys.setprofile(questions)
    try:
        plan(model, scheme, None, True, None, False)
    finally:
        sys.setprofile(before)
    assert len(questions.walks) == 1
    schemes = 0 if name == "embed" else 1
    assert questions.asked == Counter({"kind_of": 1, "unsupported_reason": 1, "__call__": schemes})


def test_records() -> None:
    model = Model()
    found = walk(model)
    kinds = {layer.row.name: layer.kind for layer in found.layers}
    assert kinds == {"embed": "embedding", "body.0": "linear", "gate": "linear", "head": "linear"}
    shared = found.linears[0]
    assert shared.row.aliases == ["again"]
    assert [(type(parent).__name__, attribute) for parent, attribute in shared.places] == [
        ("Model", "again"),
        ("Sequential", "0"),
    ]
    assert {layer.row.name for layer in found.layers if layer.excluded} == {"gate"}
    assert found.modules["again"] is found.modules["body.0"] is model.again
    assert [(name, key) for name, key, _ in found.parameters] == [
        ("embed", "weight"),
        ("body.0", "weight"),
        ("body.0", "bias"),
        ("gate", "weight"),
        ("gate", "bias"),
        ("conv", "weight"),
        ("conv", "bias"),
        ("head", "weight"),
    ]


def test_records_of_a_quantized_model() -> None:
    model = Model()
    qao.quantize_(model, INT8, embeddings=True, progress=False)
    found = walk(model)
    assert {layer.row.name for layer in found.layers if layer.already_quantized} == {"embed", "body.0", "head"}
    assert [layer.row.shape for layer in found.layers] == [(16, 8), (8, 8), (2, 8), (16, 8)]


def test_weights_are_rows_of_outputs() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(4, 8)
    (layer,) = walk(nn.Sequential(conv1d)).layers
    assert layer.kind == "conv1d" and layer.row.shape == (4, 8)
    assert torch.equal(layer.weight, conv1d.weight.t())
