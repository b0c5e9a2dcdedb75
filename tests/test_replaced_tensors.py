"""Functions of torch that replace tensors of a layer: the right result, or an error before anything changes."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import qao
import torch
from one_layer import INT4, X, of, quantized, unchanged
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils import swap_tensors

SCHEMES = [INT4, qao.Fp4WeightOnly("nvfp4"), qao.Int8WeightOnly()]


# ---- functional_call -------------------------------------------------------------------------------------------------

TENSORS: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "state_dict": lambda model: model.state_dict(),
    "Parameters": lambda model: dict(model.named_parameters()),
    "detached": lambda model: {name: tensor.detach() for name, tensor in model.named_parameters()},
    "cloned": of,
}


@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_functional_call(scheme: qao.Scheme, tensors: Callable[[nn.Module], dict[str, Tensor]]) -> None:
    model, alike, other = quantized(7, scheme), quantized(7, scheme, seed=1), quantized(4, scheme)
    before = of(model)
    assert torch.equal(functional_call(model, tensors(model), (X,)), model(X))
    assert torch.equal(functional_call(model, tensors(alike), (X,)), alike(X))
    assert torch.equal(functional_call(model, tensors(alike), (X,), strict=True), alike(X))
    with pytest.raises(ValueError, match=r"\[4, 64\]|smaller layer|qweight must be|scales must be"):
        functional_call(model, tensors(other), (X,))
    assert unchanged(model, before)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x


def test_functional_call_returns_the_buffers_of_the_call() -> None:
    model = nn.Sequential(*quantized(7), Counter())
    state = model.state_dict()
    functional_call(model, state, (X,))
    assert state["1.count"] == 1 and model[1].count == 0 and "0.pip_install_qao" in state


def test_functional_call_compiled() -> None:
    model, other = quantized(7), quantized(7, seed=1)
    compiled = torch.compile(lambda tensors, x: functional_call(model, tensors, (x,)), backend="eager", fullgraph=True)
    assert torch.equal(compiled(dict(other.named_parameters()), X), other(X))


# ---- swap_tensors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qweight", "scales"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_swapped_tensors_are_of_one_size(scheme: qao.Scheme, name: str) -> None:
    model, other, larger = quantized(7, scheme), quantized(4, scheme), quantized(70, scheme)
    before = of(model)
    for wrong in (other, larger):
        with pytest.raises(ValueError, match=r"swap_tensors: .* of a weight \[7, 64\] and .* of a weight"):
            swap_tensors(getattr(model[0], name), getattr(wrong[0], name))
    with pytest.raises(ValueError, match="swap_tensors"):
        swap_tensors(getattr(model[0], name), nn.Parameter(torch.zeros(3)))
    assert unchanged(model, before)


def test_swapped_layers_compute_the_other() -> None:
    model, other = quantized(7), quantized(7, seed=1)
    expected = other(X)
    for name in ("qweight", "scales"):
        swap_tensors(getattr(model[0], name), getattr(other[0], name))
    assert torch.equal(model(X), expected)


def test_the_dequantized_weight_is_not_swapped() -> None:
    model = quantized(7)
    for pair in ((model[0].weight, torch.zeros(7, 64)), (torch.zeros(7, 64), model[0].weight)):
        with pytest.raises(RuntimeError, match="swap_tensors: .*load_float_.*update_"):
            swap_tensors(*pair)
        assert {type(tensor) for tensor in pair} == {Tensor, type(model[0].weight)}


def test_conversion_that_swaps_tensors() -> None:
    model = quantized(7, bias=True)
    expected = model[0].dequantize()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.bfloat16()
        model.load_state_dict(model.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model[0].bias.dtype == torch.bfloat16 and torch.equal(model[0].dequantize(), expected)
    model.requires_grad_()
    assert model[0].bias.requires_grad


# ---- parametrizations and pruning ------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / 2


register_parametrization = inspect.unwrap(parametrize.register_parametrization)  # torch's function without qao's check
CHANGES: dict[str, Callable[[nn.Module, str], object]] = {
    "old weight_norm": lambda layer, name: nn.utils.weight_norm(layer, name),
    "old spectral_norm": lambda layer, name: nn.utils.spectral_norm(layer, name),
    "weight_norm": lambda layer, name: parametrizations.weight_norm(layer, name),
    "spectral_norm": lambda layer, name: parametrizations.spectral_norm(layer, name),
    "orthogonal": lambda layer, name: parametrizations.orthogonal(layer, name),
    "parametrization": lambda layer, name: parametrize.register_parametrization(layer, name, Doubled()),
    "identity": prune.identity,
    "l1": lambda layer, name: prune.l1_unstructured(layer, name, 0.5),
    "random": lambda layer, name: prune.random_unstructured(layer, name, 0.5),
    "structured": lambda layer, name: prune.random_structured(layer, name, 0.5, 0),
    "mask": lambda layer, name: prune.custom_from_mask(layer, name, torch.ones(7, 64)),
    "global": lambda layer, name: prune.global_unstructured([(layer, name)], prune.L1Unstructured, amount=1),
}


@pytest.mark.filterwarnings("ignore:.*(weight_norm|spectral_norm).* is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["weight", "qweight", "scales"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_quantized_weight_is_not_computed_from_others(change: Callable[[nn.Module, str], object], name: str) -> None:
    model = quantized(7, bias=True)
    before, kind = of(model), type(model[0])
    with pytest.raises(TypeError, match=rf"{name} of this QuantLinear .*qao\.dequantize_\(model\)"):
        change(model[0], name)
    assert unchanged(model, before) and type(model[0]) is kind


def test_the_layer_itself_refuses_to_lose_its_tensors() -> None:
    """For who imported torch's functions before qao."""
    model = quantized(7)
    before = of(model)
    for name in ("qweight", "scales"):
        with pytest.raises(TypeError, match=rf"del {name}: .*qao\.dequantize_\(model\)"):
            delattr(model[0], name)
    with pytest.raises(TypeError, match=r"del qweight: .*qao\.dequantize_\(model\)"):
        register_parametrization(model[0], "qweight", nn.Identity(), unsafe=True)
    assert unchanged(model, before)
    model[0].note = 1
    del model[0].note


# ---- vectors ---------------------------------------------------------------------------------------------------------


def test_vectors_of_parameters() -> None:
    model = nn.Sequential(*quantized(7, bias=True), nn.Linear(7, 2)).requires_grad_()
    before = of(model)
    with pytest.raises(TypeError, match=r"vector_to_parameters: .*if p\.requires_grad\]"):
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()), model.parameters())
    assert unchanged(model, before)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(trained) + 1, trained)
    assert torch.equal(model[0].bias, before["0.bias"] + 1) and torch.equal(model[0].qweight, before["0.qweight"])


# ---- averages, copies, assignments -----------------------------------------------------------------------------------

Loop = Callable[[nn.Module, nn.Module], object]


def average(own: Tensor, new: Tensor) -> Tensor:
    return 0.9 * own + 0.1 * new


def zipped(pairs: Callable[[nn.Module], Iterable[Tensor]], write: Callable[[Tensor, Tensor], object]) -> Loop:
    return lambda own, new: [write(*pair) for pair in zip(pairs(own), pairs(new), strict=True)]


def values(model: nn.Module) -> Iterable[Tensor]:
    return model.state_dict().values()


def parameters(model: nn.Module) -> Iterable[Tensor]:
    return model.parameters()


def loaded(own: nn.Module, new: nn.Module) -> None:
    ours, theirs = own.state_dict(), new.state_dict()
    own.load_state_dict({name: average(value, theirs[name]) for name, value in ours.items()})


def lerp(own: Tensor, new: Tensor) -> Tensor:
    return own.lerp_(new, 0.1) if own.is_floating_point() else own.copy_(new)


AVERAGES: dict[str, tuple[Loop, str]] = {  # the loop, and its error for codes
    "timm's ModelEmaV2": (zipped(values, lambda own, new: own.copy_(average(own, new))), "averaged.*AveragedModel"),
    "detached": (zipped(values, lambda own, new: own.detach().copy_(average(own, new))), "averaged.*AveragedModel"),
    "items": (zipped(values, lambda own, new: own.__setitem__(..., average(own, new))), "averaged.*AveragedModel"),
    "Parameters": (zipped(parameters, lambda own, new: own.copy_(average(own, new))), "averaged.*AveragedModel"),
    "timm's ModelEmaV3": (zipped(values, lerp), ""),
    "only floats": (zipped(parameters, lambda own, new: own.is_floating_point() and own.data.lerp_(new.data, 0.1)), ""),
    "mul_, add_": (zipped(values, lambda own, new: own.mul_(0.9).add_(new, alpha=0.1)), "can't be cast"),
    "load_state_dict": (loaded, "the checkpoint holds float32"),
}


@pytest.mark.parametrize("loop, error", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_averages_by_hand(scheme: qao.Scheme, loop: Loop, error: str) -> None:
    model = nn.Sequential(*quantized(7, scheme), nn.Linear(7, 2))
    own = copy.deepcopy(model)
    codes, floats = own[0].qweight.clone(), own[1].weight.clone()
    with torch.no_grad():
        model[1].weight.add_(1)
        if error:
            with pytest.raises((TypeError, RuntimeError), match=error):
                loop(own, model)
        else:
            loop(own, model)
            torch.testing.assert_close(own[1].weight, floats + 0.1)
            torch.testing.assert_close(own(X), own[1](model[0](X)))
    assert torch.equal(own[0].qweight, codes)


COPIES: dict[str, Loop] = {
    "copy_": zipped(parameters, lambda own, new: own.copy_(new)),
    "copy_ into a state_dict": zipped(values, lambda own, new: own.copy_(new)),
    "assignment": lambda own, new: assign(own[0], new[0]),
    "register_parameter": lambda own, new: assign(own[0], new[0], qao.QuantLinear.register_parameter),
}


def assign(own: Any, new: Any, write: Callable[[Any, str, Any], object] = setattr) -> None:
    for name in ("qweight", "scales"):
        write(own, name, nn.Parameter(getattr(new, name).detach().clone(), requires_grad=False))


@pytest.mark.parametrize("write", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_copies_and_assignments_are_of_one_size(scheme: qao.Scheme, write: Loop) -> None:
    model, alike = quantized(7, scheme), quantized(7, scheme, seed=1)
    with torch.no_grad():
        write(model, alike)
        assert torch.equal(model(X), alike(X))
        for n in (4, 9):
            with pytest.raises((ValueError, RuntimeError), match=r"weight \[.*, 64\]|(smaller|larger) layer|must"):
                write(model, quantized(n, scheme))


def test_columns_of_an_assigned_weight() -> None:
    narrow = qao.QuantLinear.from_linear(nn.Linear(60, 7), INT4)
    with pytest.raises(ValueError, match="fewer columns"):
        assign(quantized(7)[0], narrow)
    with pytest.raises(ValueError, match="larger layer"):
        assign(narrow, quantized(7)[0])


def test_tensors_of_a_state_dict_are_plain_elsewhere() -> None:
    model = quantized(7)
    value, file = model.state_dict()["0.qweight"], io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = [
        value.clone(),
        value + 0,
        copy.deepcopy(value),
        pickle.loads(pickle.dumps(value)),
        torch.load(file)["0.qweight"],
    ]
    assert {type(one) for one in plain} == {Tensor} and all(torch.equal(one, value) for one in plain)
    made = nn.Parameter(value, requires_grad=False)
    assert type(made) is nn.Parameter and made.data_ptr() == model[0].qweight.data_ptr()
    model.load_state_dict(model.state_dict(), assign=True)
    assert type(model[0].qweight) is nn.Parameter
