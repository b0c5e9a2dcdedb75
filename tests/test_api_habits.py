"""Habits from other packages: argument orders, operators as functions, the way back to float."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from qao import Int4WeightOnly, QuantLinear, quantize_
from qao.diagnostics.sensitivity import by_layer
from torch import Tensor, nn

SCHEME = Int4WeightOnly(group_size=32)

# Models here are so small that every weight in them is a big one.
pytestmark = pytest.mark.filterwarnings("ignore:quantize_. these big weights stay")


def model_with_head() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"up": nn.Linear(64, 96), "down": nn.Linear(96, 64), "head": nn.Linear(64, 32)})


def quantized(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, QuantLinear)]


# ---- functions of a name and a module --------------------------------------------------------------------------------


def annotated(a: nn.Module, b: str) -> bool:
    return isinstance(a, nn.Linear) and b != "head"


class Filter:
    def method(self, mod: nn.Module, fqn: str) -> bool:
        return isinstance(mod, nn.Linear) and fqn != "head"

    def __call__(self, layer_name: str, layer: Any, extra: int = 0) -> bool:
        return isinstance(layer, nn.Linear) and layer_name != "head"


FILTERS: dict[str, Any] = {
    "name, module": lambda name, module: isinstance(module, nn.Linear) and name != "head",
    "module, fqn": lambda module, fqn: isinstance(module, nn.Linear) and fqn != "head",
    "m, fqn": lambda m, fqn: isinstance(m, nn.Linear) and "head" not in fqn,
    "m, n": lambda m, n: isinstance(m, nn.Linear) and "head" not in n,
    "mod, *_": lambda mod, *rest: isinstance(mod, nn.Linear) and rest[0] != "head",
    "_, module": lambda _, module: module.out_features != 32,
    "_, name": lambda _, name: name != "head",
    "annotated": annotated,
    "method": Filter().method,
    "callable object": Filter(),
    "partial": functools.partial(lambda wanted, m, fqn: fqn in wanted, ("up", "down")),
}


NAME_FIRST = {"name, module", "_, module", "callable object"}
MODULE_FIRST = {key: function for key, function in FILTERS.items() if key not in NAME_FIRST}


@pytest.mark.parametrize("function", MODULE_FIRST.values(), ids=MODULE_FIRST)
def test_filters_and_schemes(function: Any) -> None:
    filtered, chosen, old = model_with_head(), model_with_head(), model_with_head()
    quantize_(filtered, SCHEME, filter_fn=function)
    with pytest.warns(
        DeprecationWarning, match=r"^qao.quantize_\(filter=...\) is now filter_fn\(module, fqn\);"
    ) as caught:
        quantize_(old, SCHEME, filter=function)
    assert [warning.filename for warning in caught] == [__file__]
    assert quantized(filtered) == quantized(old) == ["up", "down"]

    @functools.wraps(function)  # takes its signature
    def scheme(*arguments: Any) -> Any:
        return SCHEME if function(*arguments) else None

    quantize_(chosen, scheme)
    assert quantized(chosen) == ["up", "down"]


@pytest.mark.parametrize("key", sorted(NAME_FIRST))
def test_functions_of_name_and_module_are_refused(key: str) -> None:
    model = model_with_head()
    message = r"is called with \(module, fqn\), but takes \(.*\): swap them"
    with pytest.raises(TypeError, match=f"^quantize_: filter {message}"), pytest.warns(DeprecationWarning):
        quantize_(model, SCHEME, filter=FILTERS[key])
    for arguments in ({"scheme": FILTERS[key]}, {"scheme": SCHEME, "filter_fn": FILTERS[key]}):
        with pytest.raises(TypeError, match=f"^quantize_: {[*arguments][-1]} {message}"):
            quantize_(model, **arguments)
    assert not quantized(model)


def test_filter_fn_of_unclear_order_is_called_as_in_torchao() -> None:
    calls: list[Any] = []
    quantize_(model := model_with_head(), SCHEME, filter_fn=lambda *both: calls.append(both) or both[1] != "head")
    assert quantized(model) == ["up", "down"]
    assert all(isinstance(a, nn.Linear) and b in model for a, b in calls) and len(calls) == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"filter_fn": FILTERS["name, module"]},
            r"is called with \(module, fqn\), but takes \(name, module\): swap them",
        ),
        ({"filter_fn": FILTERS["callable object"]}, r"but takes \(layer_name: 'str', layer: 'Any', extra: 'int' = 0\)"),
        ({"filter_fn": lambda module: True}, r"is called with a module and a name, but takes \(module\)"),
        ({"filter_fn": "head"}, r"must be a function of \(module, fqn\), not 'head'"),
        ({"filter_fn": FILTERS["m, n"], "filter": FILTERS["m, n"]}, "filter is the old name of filter_fn"),
    ],
)
def test_a_filter_fn_that_makes_no_sense(arguments: dict[str, Any], message: str) -> None:
    model = model_with_head()
    with pytest.raises(TypeError, match=f"quantize_: .*{message}"):
        quantize_(model, SCHEME, **arguments)
    with pytest.raises(TypeError, match=f"calibrate: .*{message}"):
        qao.calibrate(model, [torch.ones(2, 64)], SCHEME, **arguments)
    with pytest.raises(TypeError, match=f"by_layer: .*{message}"):
        by_layer(model, [1, 2, 3], SCHEME, **arguments)
    assert not quantized(model)


def test_nothing_quantized_is_a_warning_that_says_why() -> None:
    model = model_with_head()
    model["up"].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"no layer was quantized.\n  2 of 3: by the filter\n  1 of 3: no scheme"):
        quantize_(model, {"up": None, "re:.*": SCHEME}, filter_fn=lambda module, fqn: False)
    with pytest.warns(UserWarning, match=r"no layer was quantized.\n  2 of 3: by the filter\n  1 of 3: it has forward"):
        quantize_(model, SCHEME, filter_fn=lambda module, fqn: fqn == "up")
    with pytest.warns(UserWarning, match="no layer was quantized. The model has no linear layers"):
        quantize_(nn.Sequential(nn.ReLU()), SCHEME)


# ---- operators -------------------------------------------------------------------------------------------------------

OPERATORS = {
    schema.name.removeprefix("qao::"): schema
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("qao::") and not schema.name.startswith("qao::_")
}
PYTHON_TYPE = {"Tensor": "Tensor", "Optional[Tensor]": "Tensor | None", "int": "int", "float": "float", "bool": "bool"}
PYTHON_TYPE |= {"List[float]": "Sequence[float]", "Optional[List[float]]": "Gate | None"}


def test_the_operators_are_found() -> None:
    assert {"int4_mm", "pack_int4", "silu_mul_quantize"} <= OPERATORS.keys()


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_has_a_function_of_its_arguments(operator: str) -> None:
    function = getattr(qao.ops, operator)
    assert isinstance(function, types.FunctionType) and inspect.getdoc(function)
    parameters = inspect.signature(function).parameters
    arguments = OPERATORS[operator].arguments
    renamed = {"row_scale": "router_weights"}  # next to row_scales of the weight
    names = [renamed.get(argument.name, argument.name) for argument in arguments]
    assert list(parameters) == names
    for name, argument in zip(names, arguments, strict=True):
        # A schema spells ScalarType "int" once it is registered.
        expected = "torch.dtype" if name.endswith("dtype") else PYTHON_TYPE[str(argument.type)]
        assert parameters[name].annotation == expected, name
    results = ", ".join("Tensor" for _ in OPERATORS[operator].returns) or "None"
    assert inspect.signature(function).return_annotation == (f"tuple[{results}]" if "," in results else results)


def test_the_stub_of_the_raw_operators_is_that_of_their_schemas() -> None:
    """Run `python tools/stubs.py` after a change of a schema."""
    stubs = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "stubs.py"))
    assert stubs["STUB"].read_text() == stubs["text"]()
    assert qao.ops.raw.int4_mm is torch.ops.qao.int4_mm and "int4_mm" in dir(qao.ops.raw)


def test_an_argument_under_its_old_name_warns() -> None:
    x, weight = torch.randn(2, 16), torch.ones(1, 8, 16, dtype=torch.int8)
    scales, offsets, router = torch.ones(1, 8), torch.tensor([2], dtype=torch.int32), torch.tensor([0.5, 2.0])
    tensors = x, weight, scales, None, offsets, None
    expected = qao.ops.int8_grouped_mm(*tensors, router_weights=router)
    message = r"^int8_grouped_mm\(row_scale=...\) is now router_weights=...; the old name will be removed in qao 0.4"
    with pytest.warns(DeprecationWarning, match=message) as caught:
        assert torch.equal(qao.ops.int8_grouped_mm(*tensors, row_scale=router), expected)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(TypeError, match="row_scale is the old name"), pytest.warns(DeprecationWarning):
        qao.ops.int8_grouped_mm(*tensors, row_scale=router, router_weights=router)


def test_save_and_load_take_a_module_under_its_old_name(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model, path = model_with_head(), tmp_path / "model.safetensors"
    with pytest.warns(DeprecationWarning, match=r"save\(module=...\) is now model=..."):
        qao.save(module=model, path=path)
    with pytest.warns(DeprecationWarning, match=r"load\(module=...\) is now model=..."):
        loaded = qao.load(path, module=model_with_head())
    assert torch.equal(loaded["up"].weight, model["up"].weight)


def test_the_functions_are_the_operators() -> None:
    """Every function without a gradient, with arguments that all differ."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 64), torch.rand(64)
    q, scales, zeros = torch.randint(0, 16, (32, 64), dtype=torch.uint8), torch.rand(32, 2), torch.full((32, 2), 7.0)
    packed = qao.ops.pack_int4(q, scales, zeros, 32)
    sizes = 32, 64, 32
    w8, scale8 = torch.randint(-127, 128, (32, 64), dtype=torch.int8), torch.rand(32)
    x8, x8_scales, x8_zeros = qao.ops.int8_quantize(x, False)
    f8, f8_scales = qao.ops.fp8_quantize(x, None, -1)
    bias, sums = torch.rand(32), torch.rand(32)
    w_fp8 = torch.randn(32, 64).to(torch.float8_e4m3fn)
    calls: dict[str, tuple[Any, ...]] = {
        "pack_int4": (q, scales, zeros, 32),
        "unpack_int4": (*packed, *sizes),
        "dequantize_int4": (*packed, *sizes, torch.bfloat16),
        "int4_embedding": (torch.tensor([[3, 31]]), *packed, *sizes, torch.bfloat16),
        "int8_embedding": (torch.tensor([0, 3], dtype=torch.int32), w8, scale8, torch.float16),
        "hadamard": (x, 32),
        "int8_quantize": (x, True, 64),
        "fp8_quantize": (x, torch.tensor([0.01]), 0),
        "rms_norm_quantize": (x, weight, 1e-3, torch.int8),
        "add_rms_norm_quantize": (x, x + 1, weight, 1e-3, torch.float8_e4m3fn),
        "silu_mul_quantize": (x, x + 1, torch.int8),
        "swiglu_quantize": (x, 1.702, 7.0, 1.0, True, torch.int8),
        "int8_scaled_mm": (x8, x8_scales, x8_zeros, w8, scale8, bias, sums, torch.float32),
        "fp8_scaled_mm": (f8, f8_scales, w_fp8, scale8, bias, torch.bfloat16, True),
        "add_rms_norm_int4_mm": (x, x + 1, weight, *packed, bias, 1e-3, *sizes, True),
    }
    for name, arguments in calls.items():
        actual, expected = getattr(qao.ops, name)(*arguments), getattr(torch.ops.qao, name)(*arguments)
        both = zip(*((t,) if isinstance(t, Tensor) else t for t in (actual, expected)), strict=True)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in both), name
    assert all(torch.equal(a, b) for a, b in zip(qao.ops.unpack_int4(*packed, *sizes), (q, scales, zeros), strict=True))


# ---- the way back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dequantize_gives_linears_of_the_weights_in_use(dtype: torch.dtype) -> None:
    model = model_with_head().to(dtype).eval()
    quantize_(model, {"up": SCHEME, "down": qao.Int8WeightOnly(), "head": qao.Float8DynamicActivationFloat8Weight()})
    expected = {name: (layer.dequantize(dtype), layer.bias.to(dtype)) for name, layer in model.items()}
    assert qao.dequantize_(model) is model
    for name, (weight, bias) in expected.items():
        linear = model[name]
        assert type(linear) is nn.Linear and not linear.training and linear.weight.dtype == linear.bias.dtype == dtype
        assert torch.equal(linear.weight, weight) and torch.equal(linear.bias, bias)
        assert not linear.weight.requires_grad and not linear.bias.requires_grad
    model.requires_grad_()  # all floats again


def test_dequantize_keeps_sharing() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    model.append(model[2])
    quantize_(model, SCHEME)
    qao.dequantize_(model)
    assert model[1].weight is model[0].weight and model[1].bias is not model[0].bias
    assert model[3] is model[2] and model[2].bias is None and model[2].weight is not model[0].weight
    again = quantize_(model, SCHEME)
    assert all(row.relative_error is not None and row.relative_error < 0.02 for row in again.rows)


@pytest.mark.parametrize("scale", [None, 8.0, torch.tensor(8.0)], ids=str)
def test_dequantize_embeddings(scale: Any) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(50, 64, padding_idx=3), "head": nn.Linear(64, 50, bias=False)})
    model["head"].weight = model["embed"].weight
    model._tied_weights_keys = {"head.weight": "embed.weight"}
    quantize_(model, SCHEME, embeddings=True)
    model["embed"].embed_scale = scale
    ids = torch.arange(50)
    expected = model["embed"](ids)
    assert model._tied_weights_keys == {"head.qweight": "embed.qweight", "head.scales": "embed.scales"}
    qao.dequantize_(model)
    assert isinstance(model["embed"], nn.Embedding) and type(model["head"]) is nn.Linear
    assert model["embed"].weight is model["head"].weight and not model["embed"].weight.requires_grad
    assert model["embed"].padding_idx == 3 and torch.equal(model["embed"](ids), expected)
    assert model._tied_weights_keys == {"head.weight": "embed.weight"}


def test_dequantize_refuses_what_would_be_lost() -> None:
    model = model_with_head()
    quantize_(model, SCHEME)
    model["head"].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="dequantize_: head: it has forward_hooks, which would be lost"):
        qao.dequantize_(model)
    assert quantized(model) == ["up", "down", "head"]
    with pytest.raises(TypeError, match="cannot replace itself"):
        qao.dequantize_(model["up"])


# ---- a mapped file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [SCHEME, qao.Int8WeightOnly()], ids=str)
def test_assigned_tensors_at_odd_addresses_are_copied_once(scheme: qao.Scheme) -> None:
    """Tensors of a mapped safetensors file are unaligned, and kernels read 16 bytes at a time; tied ones stay tied."""

    def make() -> nn.ModuleDict:
        torch.manual_seed(0)
        model = nn.ModuleDict({"embed": nn.Embedding(50, 64), "head": nn.Linear(64, 50, bias=False)})
        model["head"].weight = model["embed"].weight
        quantize_(model, scheme, embeddings=True)
        return model

    model, other = make(), make()
    shifted: dict[int, Tensor] = {}
    state = {}
    for name, tensor in model.state_dict().items():
        room = torch.empty(tensor.nbytes + 20, dtype=torch.uint8)
        offset = -room.data_ptr() % 16 + 4
        copied = room[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        assert copied.data_ptr() % 16 == 4
        state[name] = shifted.setdefault(tensor.data_ptr(), copied)
    for parameter in other.parameters():
        parameter.data.zero_()
    for _ in range(2):
        other.load_state_dict(state, assign=True)
        for key in ("qweight", "scales"):
            own = getattr(other["head"], key)
            assert own is getattr(other["embed"], key) and own.data_ptr() % 16 == 0
            assert torch.equal(own, getattr(model["head"], key))
    x = torch.randn(3, 64)
    assert torch.equal(other["head"](x), model["head"](x))


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made_anew", ["as made", "copied", "moved", "pickled", "loaded", "assigned"])
def test_requires_grad_of_a_whole_model(made_anew: str) -> None:
    """Float parameters become trainable; packed tensors do not change, because torch refuses integers."""
    model = nn.Sequential(nn.Embedding(10, 64), nn.Linear(64, 64), nn.LayerNorm(64))
    quantize_(model, SCHEME)
    if made_anew == "copied":
        model = copy.deepcopy(model)
    elif made_anew == "moved":
        model = model.to("meta").to_empty(device="cpu").bfloat16()
    elif made_anew == "pickled":
        model = pickle.loads(pickle.dumps(model))
    elif made_anew in ("loaded", "assigned"):
        model.load_state_dict(model.state_dict(), assign=made_anew == "assigned")
    assert model.requires_grad_() is model
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {"0.weight", "1.bias", "2.weight", "2.bias"}
    model(torch.tensor([[1, 2]])).sum().backward()
    assert model[1].bias.grad is not None and model[1].qweight.grad is None
    model.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_library_needs_only_its_dependencies():
    """Every module imports without numpy and without the libraries that qao integrates with."""
    walk = """
import importlib, pkgutil, sys, warnings
warnings.simplefilter("ignore")  # torch warns that there is no numpy
for name in ("numpy", "gguf", "transformers", "huggingface_hub"):
    sys.modules[name] = None
import qao
for module in pkgutil.walk_packages(qao.__path__, "qao."):
    if not module.name.startswith(("qao.integrations.", "qao._C", "qao.__main__")):
        importlib.import_module(module.name)
"""
    run = subprocess.run([sys.executable, "-c", walk], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
