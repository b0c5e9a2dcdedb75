"""qao.explain and the doctor: their reports, checked against the facts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import qao
import torch
from ops_support import randn
from qao.diagnostics import doctor, operator_checks
from qao.diagnostics.compile_report import Compilation
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head, self.unused = nn.Linear(64, 10), nn.Linear(64, 64)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.head(x.t().contiguous().t())


SCHEMES = {"layers": qao.Int8DynamicActivationInt8Weight(), "head": qao.Int4WeightOnly(), "unused": None}
OPTIONS = {"backend": "aot_eager"}


def make(device: str, schemes: dict[str, qao.Scheme | None] = SCHEMES, breaks: bool = False) -> Model:
    model = Model(breaks).to(device)
    qao.quantize_(model, schemes, progress=False)
    return model


def x_of(m: int, device: str) -> Tensor:
    return randn(m, 64, dtype=torch.float32, device=device)


@torch.inference_mode()
def test_a_call_of_every_layer(device: str) -> None:
    explanation = qao.explain(make(device), x_of(3, device), more=[(x_of(5, device),)], compile=OPTIONS)
    assert [(call.name, call.tokens, call.calls) for call in explanation.layers] == [
        *((f"layers.{i}", 3, 1) for i in range(3)),
        ("head", 3, 1),
        *((f"layers.{i}", 5, 1) for i in range(3)),
        ("head", 5, 1),
    ]
    first = explanation.layers[0]
    assert first.shape == (64, 64) and first.scheme == "int8_int8" and first.x_dtype == "float32"
    assert first.kernel and first.why
    assert [call.copied for call in explanation.layers[:4]] == [False, False, False, True]
    assert explanation.uncalled == [] and explanation.unquantized == {"unused": "though it could be"}
    text = str(explanation)
    assert "layers.{0..2} x3" in text and "head" in text and "x is copied first" in text
    json.dumps(explanation.to_dict())


@torch.inference_mode()
def test_one_graph_and_its_inputs(device: str) -> None:
    compilation = qao.explain(make(device), x_of(3, device), compile=OPTIONS).compilation
    assert compilation is not None
    assert compilation.graphs == 1 and compilation.breaks == [] and compilation.recompiles == []
    assert compilation.graph_inputs == [1 + 4 * 3] and compilation.seconds > 0 and compilation.error is None


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor, shift: Tensor | None = None, *, twice: bool = False) -> Tensor:
        y = self.layer(x if shift is None else x + shift)
        return y * 2 if twice else y


class OneDict(nn.Module):
    """As the models of sentence-transformers: the dict is the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, features: dict[str, Tensor], **kwargs: Any) -> Tensor:
        return self.layer(features["x"])


@torch.inference_mode()
@pytest.mark.parametrize("wrap", [dict, UserDict])
def test_dicts_are_keyword_arguments(wrap: Any, device: str) -> None:
    model = Keywords().to(device)
    qao.quantize_(model, qao.Int8WeightOnly(), progress=False)
    x, longer = x_of(3, device), x_of(5, device)
    more = [wrap({"x": longer, "shift": longer}), (longer, longer), {"x": longer, "twice": False}]
    explanation = qao.explain(model, wrap({"x": x, "shift": x}), more=more, twice=True, compile=OPTIONS)
    assert [(call.tokens, call.calls) for call in explanation.layers] == [(3, 1), (5, 3)]
    compilation = explanation.compilation
    assert compilation is not None and compilation.error is None
    assert compilation.recompiles


@torch.inference_mode()
def test_a_dict_that_is_the_argument_stays_one(device: str) -> None:
    model = OneDict().to(device)
    qao.quantize_(model, qao.Int8WeightOnly(), progress=False)
    explanation = qao.explain(model, {"x": x_of(3, device)}, compile=False)
    assert [call.tokens for call in explanation.layers] == [3]


@torch.inference_mode()
def test_conditions_on_sizes_are_sizes(device: str) -> None:
    """A batch of one, then one of four: torch says "args[0].stride()[0] == args[0].size()[1]"."""
    model = nn.Sequential(nn.Linear(64, 64)).to(device)
    qao.quantize_(model, qao.Int8DynamicActivationInt8Weight(), progress=False)
    x = randn(4, 22, 64, dtype=torch.float32, device=device)
    more = [(x[:2],), (x[:1, :11],), (x,), (x[:, :5],)]
    explanation = qao.explain(model, x[:2, :11], more=more, compile=OPTIONS)
    compilation = explanation.compilation
    assert compilation is not None and len(compilation.recompiles) >= 2
    advice = " ".join(explanation.advice)
    assert "Recompiled for another size" in advice and "other reasons" not in advice


def test_why_a_layer_is_not_quantized() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 64), "head": nn.Linear(64, 8), "router": nn.Linear(64, 4)})
    model["head"].weight = model["embed"].weight
    model["plain"], model["hooked"] = nn.Linear(64, 64), nn.Linear(64, 64)
    model["hooked"].register_forward_hook(lambda *_: None)
    model.forward = lambda: None
    reasons = qao.explain(model, compile=False).unquantized
    assert reasons.pop("plain") == "though it could be"
    assert "embeddings=True" in reasons.pop("head") and "a router" in reasons.pop("router")
    assert "forward_hooks" in reasons.pop("hooked") and not reasons


@torch.inference_mode()
def test_breaks_and_recompilations_have_reasons(device: str) -> None:
    model = make(device, breaks=True)
    explanation = qao.explain(model, x_of(3, device), more=[(x_of(5, device),)], compile=OPTIONS)
    compilation = explanation.compilation
    assert compilation is not None and compilation.graphs == 4
    assert len(compilation.breaks) == 1 and "test_explain.py" in compilation.breaks[0]
    assert len(compilation.recompiles) == 2 and all("size mismatch" in text for text in compilation.recompiles)
    advice = " ".join(explanation.advice)
    assert "1 graph break: " in advice and "mark_dynamic" in advice and "Not quantized: 1 linear layer, " in advice


@torch.inference_mode()
def test_a_compilation_that_fails_is_a_result(device: str) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> None:
        raise RuntimeError("out of luck")

    explanation = qao.explain(make(device), x_of(3, device), compile={"backend": backend})
    assert explanation.compilation is not None and "out of luck" in (explanation.compilation.error or "")
    assert "torch.compile failed" in explanation.advice[0]


def test_a_long_error_is_shortened() -> None:
    """Inductor's C++ errors have thousands of lines, which would hide the table and the advice."""
    error = "\n".join(["C++ compile error", "g++ " + "-I folder " * 100, *(f"warning {i}" for i in range(2000))])
    lines = list(Compilation(error=error).describe())
    assert lines[1] == "failed: C++ compile error" and lines[-1].startswith("… and 1992 more lines")
    assert len(lines) == 12 and max(map(len, lines)) < 410


@torch.inference_mode()
def test_a_first_reset_that_fails_is_tried_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reset, calls = torch._dynamo.reset, 0

    def first_fails() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("dictionary changed size during iteration")
        reset()

    monkeypatch.setattr(torch._dynamo, "reset", first_fails)
    compilation = qao.explain(make(device), x_of(3, device), compile=OPTIONS).compilation
    assert compilation is not None and compilation.graphs == 1 and calls == 3


@torch.inference_mode()
def test_nothing_to_say_and_nothing_quantized(device: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).to(device)
    assert "quantize_" in " ".join(qao.explain(model, x_of(3, device), compile=False).advice)
    qao.quantize_(model, qao.Int8DynamicActivationInt8Weight(), progress=False)
    assert qao.explain(model, x_of(3, device), compile=OPTIONS).advice[0].startswith("Nothing")


@torch.inference_mode()
def test_autocast_and_a_compiled_model(device: str) -> None:
    model = torch.compile(make(device))
    with torch.autocast(device, torch.bfloat16):
        explanation = qao.explain(model, x_of(3, device), compile=False)
    assert {call.x_dtype for call in explanation.layers} == {"bfloat16"}
    assert explanation.compilation is None


def test_the_doctor_knows_every_operator() -> None:
    registered = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("qao::")}
    assert set(operator_checks.OPERATORS) == registered


def test_the_doctor_finds_nothing() -> None:
    result = subprocess.run([sys.executable, "-m", "qao", "doctor"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAIL" not in result.stdout and "ABI" in result.stdout and "ok    cpu int4_mm" in result.stdout


def test_the_doctor_sees_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(operator_checks.OPERATORS, "int4_mm", lambda device: 0.5)
    found = {check.name: check.problem for check in doctor.checks() if check.problem}
    assert found and all(name.endswith("int4_mm") for name in found)
    assert "differs from the reference by 0.5" in found["cpu int4_mm"]
