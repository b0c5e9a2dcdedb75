"""layer.weight: the right numbers to read, an error for every write and for every use of its address."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import qao
import safetensors.torch
import torch
from torch import Tensor, nn

every_scheme = pytest.mark.parametrize("kind", qao.schemes.SCHEMES.values(), ids=lambda kind: kind.word)


def make(kind: type[qao.Scheme], dtype: torch.dtype = torch.bfloat16) -> Any:
    """One layer with a weight [40, 96]."""
    torch.manual_seed(0)
    return qao.QuantLinear.from_linear(nn.Linear(96, 40).to(dtype), kind())


@every_scheme
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weight_is_the_dequantized_one(kind: type[qao.Scheme], dtype: torch.dtype) -> None:
    layer = make(kind, torch.float32).to(dtype)
    weight = layer.weight
    assert (weight.dtype, weight.shape, weight.device.type) == (dtype, (40, 96), "cpu") and not weight.requires_grad
    expected = layer.dequantize(dtype)
    assert expected.dtype == dtype
    for plain in (
        weight.clone(),
        weight.data.clone(),
        torch.from_numpy(weight.float().numpy()).to(dtype),
        weight.t().t() * 1,
    ):
        assert type(plain) is Tensor and torch.equal(plain, expected)
    for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert type(copied) is Tensor and torch.equal(copied, expected)
    x = torch.randn(3, 96).to(dtype)
    assert torch.equal(nn.functional.linear(x, weight), nn.functional.linear(x, expected))


def test_facts_of_weight_cost_no_dequantization_and_its_numbers_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make(qao.Int4WeightOnly)
    calls: list[torch.dtype] = []
    dequantize = type(layer).dequantize
    monkeypatch.setattr(type(layer), "dequantize", lambda self, dtype: calls.append(dtype) or dequantize(self, dtype))
    monkeypatch.setattr("qao.nn.dequantized_weight._warned", False)
    assert layer.weight.dtype == torch.bfloat16 and layer.weight.numel() == 40 * 96 and not calls
    with pytest.warns(UserWarning, match="weight \\[40, 96\\] of a quantized layer was read"):
        layer.weight.sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.weight.sum()
    assert len(calls) == 2


def test_weight_cannot_be_written() -> None:
    layer = make(qao.Int4WeightOnly)
    with pytest.raises((KeyError, AttributeError)):
        layer.weight = nn.Parameter(torch.zeros(40, 96))


_ZEROS = torch.zeros(40, 96)
_WRITES: dict[str, Callable[[Tensor], object]] = {
    "copy_": lambda w: w.copy_(_ZEROS),
    "setitem": lambda w: w.__setitem__(0, 0.0),
    "setitem by ids": lambda w: w.__setitem__(torch.tensor([0, 1]), 0.0),
    "iadd": lambda w: w.__iadd__(1),
    "data.copy_": lambda w: w.data.copy_(_ZEROS),
    "data[:]": lambda w: w.data.__setitem__(slice(None), 0),
    "data =": lambda w: setattr(w, "data", _ZEROS),
    "init of data": lambda w: nn.init.zeros_(w.data),
    "init": lambda w: nn.init.kaiming_uniform_(w),
    "row": lambda w: w[0].zero_(),
    "slice": lambda w: w[1:3, ::2].fill_(1),
    "t": lambda w: w.t().zero_(),
    "mT": lambda w: w.mT.mul_(2),
    "detach": lambda w: w.detach().zero_(),
    "view": lambda w: w.view(-1).zero_(),
    "reshape": lambda w: w.reshape(-1).zero_(),
    "flatten": lambda w: w.flatten().zero_(),
    "unbind": lambda w: w.unbind()[0].zero_(),
    "chunk": lambda w: w.chunk(2)[1].zero_(),
    "split": lambda w: w.split(8)[0].add_(1),
    "expand": lambda w: w.expand(1, 40, 96).zero_(),
    "diagonal": lambda w: w.diagonal().zero_(),
    "as_strided": lambda w: torch.as_strided(w, (4,), (1,)).zero_(),
    "other dtype": lambda w: w.view(torch.int32).zero_(),
    "chain": lambda w: w[0][3:].t().zero_(),
    "contiguous": lambda w: w.contiguous().zero_(),
    "to": lambda w: w.to(torch.float32).zero_(),
    "cpu": lambda w: w.cpu().zero_(),
    "out": lambda w: torch.mul(_ZEROS, 1, out=w),
    "out of a view": lambda w: torch.mul(_ZEROS[0], 1, out=w[0]),
    "one of two outs": lambda w: torch.max(_ZEROS, dim=1, out=(w[:, 0], torch.zeros(40, dtype=torch.int64))),
    "foreach": lambda w: torch._foreach_zero_([w]),
    "foreach of a view": lambda w: torch._foreach_mul_([torch.ones(2), w.detach()], 2.0),
    "masked_fill_": lambda w: w.masked_fill_(w > 0, 0.0),
    "index_put_": lambda w: w.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    "apply_": lambda w: w.apply_(lambda value: 0.0),
    "resize_": lambda w: w.resize_(3),
    "set_": lambda w: w.set_(_ZEROS),
    "vector_to_parameters": lambda w: nn.utils.vector_to_parameters(_ZEROS.flatten(), [w]),
    "requires_grad_": lambda w: w.requires_grad_(),
    "requires_grad": lambda w: setattr(w, "requires_grad", True),
    "grad": lambda w: setattr(w, "grad", _ZEROS),
    "Parameter": lambda w: nn.Parameter(w),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", _WRITES.values(), ids=_WRITES)
def test_every_write_through_weight_is_an_error_that_names_the_remedy(
    write: Callable[[Tensor], object], mode: Callable[[], Any]
) -> None:
    layer = make(qao.Int8WeightOnly, torch.float32)
    before = {name: tensor.clone() for name, tensor in layer.named_parameters()}
    with mode(), pytest.raises(RuntimeError, match="load_float_.*update_.*dequantize"):
        write(layer.weight)
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.named_parameters())
    assert not torch._foreach_mul([_ZEROS], 1)[0].any()


def test_arrays_of_weight_are_read_only() -> None:
    layer = make(qao.Int8WeightOnly, torch.float32)
    expected = layer.dequantize(torch.float32).numpy()
    for array in (layer.weight.numpy(), np.asarray(layer.weight), layer.weight.t().numpy().T):
        assert np.array_equal(array, expected)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    copied = np.array(layer.weight)
    copied[0] = 0
    assert np.array_equal(layer.weight.numpy(), expected)


_ADDRESSES: dict[str, Callable[[Any], object]] = {
    "data_ptr": lambda w: w.data_ptr(),
    "of a row": lambda w: w[3].data_ptr(),
    "of detach": lambda w: w.detach().data_ptr(),
    "untyped_storage": lambda w: w.untyped_storage(),
    "storage": lambda w: w.storage(),
    "share_memory_": lambda w: w.share_memory_(),
    "from_dlpack": lambda w: torch.from_dlpack(w),
    "numpy": lambda w: np.from_dlpack(w),
    "safetensors": lambda w: safetensors.torch.save({"w": w}),
    "safetensors of a view": lambda w: safetensors.torch.save({"w": w[:2]}),
}


@pytest.mark.parametrize("take", _ADDRESSES.values(), ids=_ADDRESSES)
def test_who_takes_the_address_of_weight_gets_an_error_that_names_dequantize(take: Callable[[Tensor], object]) -> None:
    layer = make(qao.Int8WeightOnly, torch.float32)
    with pytest.raises(RuntimeError, match=r"\[.*\] has no memory.*layer\.dequantize\(\)"):
        take(layer.weight)


def test_no_address_of_weight_in_cpp_either() -> None:
    with pytest.raises(RuntimeError, match="data pointer"):
        torch._C._to_dlpack(make(qao.Int8WeightOnly).weight)


def test_copies_of_weight_have_the_right_numbers() -> None:
    layer = make(qao.Int8WeightOnly, torch.float32)
    expected = layer.dequantize(torch.float32)
    file = io.BytesIO()
    torch.save(layer.weight, file)
    file.seek(0)
    saved = safetensors.torch.load(safetensors.torch.save({"w": layer.weight.clone()}))["w"]
    for copied in (torch.load(file), saved, torch.from_dlpack(layer.weight, copy=True), copy.copy(layer.weight)):
        assert type(copied) is Tensor and torch.equal(copied, expected)
    made = nn.Parameter(layer.weight.clone())
    with torch.no_grad():
        made.zero_()  # separate memory
    assert torch.equal(layer.weight + 0, expected)
    assert f"{layer.weight[1, 2]:.3f}" == f"{expected[1, 2]:.3f}"
    assert repr(layer.weight[0]) == repr(expected[0])


@pytest.mark.parametrize("view", [lambda w: w, lambda w: w[2:9], lambda w: w.detach().t().t()])
def test_gradients_flow_past_weight_and_its_views(view: Callable[[Tensor], Tensor]) -> None:
    layer = make(qao.Int8WeightOnly, torch.float32)
    expected = view(layer.dequantize(torch.float32)).double().sum(0).expand(3, 96)
    x = torch.randn(3, 96, requires_grad=True)
    nn.functional.linear(x, view(layer.weight)).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), expected, rtol=1e-5, atol=1e-5)
    got = torch.func.grad(lambda x: nn.functional.linear(x, view(layer.weight)).sum())(x.detach())
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_weight_in_a_compiled_function() -> None:
    layer = make(qao.Int4WeightOnly)
    compiled = torch.compile(lambda x: layer(x.to(layer.weight.dtype)) + layer.weight.sum(), fullgraph=True)
    x = torch.randn(3, 96)
    expected = layer(x.bfloat16()) + layer.dequantize(torch.bfloat16).sum()
    assert torch.allclose(compiled(x).float(), expected.float(), rtol=2**-7)


def test_reads_of_weight_in_a_compiled_function() -> None:
    """All in one graph without breaks: each is traced in another way."""
    layer = make(qao.Int8WeightOnly, torch.float32)

    def read(weight: Tensor, x: Tensor) -> list[Tensor]:
        facts = weight.shape[0] * weight.dim() + weight.numel() + weight.is_floating_point() + weight.requires_grad
        x = x.to(weight.device, weight.dtype) * facts
        products = [nn.functional.linear(x, weight), x @ weight.T, (x @ weight.mT).mul_(2), x[:, :1].mul_(weight[0, 0])]
        views = [*weight.split(8), *weight.chunk(2), weight.unflatten(0, (8, 5)), weight.data[1:3, None], weight.t()]
        values = [weight.norm(dim=1), 1 - weight, 2 / weight, weight**2, torch.cat([weight, x]), *weight.max(dim=1)]
        values.append(weight.norm() + weight.norm(2))
        return [*products, *(view + 1 for view in views), *values, weight.clone().zero_(), torch.empty(1).copy_(facts)]

    compiled = torch.compile(lambda x: read(layer.weight, x), backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 96)
    for actual, expected in zip(compiled(x.clone()), read(layer.dequantize(torch.float32), x), strict=True):
        assert type(actual) is Tensor
        torch.testing.assert_close(actual, expected)


_COMPILED_WRITES = (
    *("copy_", "setitem", "iadd", "data.copy_", "data[:]", "init of data", "init", "row", "t", "mT", "detach", "view"),
    *("chunk", "split", "chain", "to", "out", "masked_fill_", "requires_grad_"),
)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_writes_through_weight_in_a_compiled_function(fullgraph: bool) -> None:
    layer = make(qao.Int8WeightOnly, torch.float32)
    for name in _COMPILED_WRITES:

        def write(x: Tensor, name: str = name) -> Tensor:
            _WRITES[name](layer.weight)
            return layer(x)

        message = "load_float_.*update_.*dequantize"
        if name == "init" and fullgraph and torch.__version__ < "2.12":
            message = "handle_torch_function"  # which Dynamo of torch 2.11 cannot trace at all
        with torch.no_grad(), pytest.raises(RuntimeError, match=message):
            torch.compile(write, backend="eager", fullgraph=fullgraph)(torch.randn(3, 96))


def test_weight_across_graph_breaks() -> None:
    layer = make(qao.Int8WeightOnly, torch.float32)

    def broken(x: Tensor) -> Tensor:
        weight, transposed, row = layer.weight, layer.weight.mT, layer.weight[0]
        torch._dynamo.graph_break()
        return x @ transposed + weight.sum() + row.sum()

    x, weight = torch.randn(3, 96), layer.dequantize(torch.float32)
    torch.testing.assert_close(
        torch.compile(broken, backend="eager")(x), x @ weight.mT + weight.sum() + weight[0].sum()
    )


# ---- traced without Dynamo -------------------------------------------------------------------------------------------


class _Using(nn.Module):
    """A layer and what a model does with its weight."""

    def __init__(self, use: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.layer = make(qao.Int8WeightOnly, torch.float32)
        self.use = use

    def forward(self, x: Tensor) -> object:
        return self.use(self.layer.weight, x)


_TRACES: dict[str, Callable[[nn.Module, Tensor], Callable[[Tensor], Any]]] = {
    "export": lambda model, x: torch.export.export(model, (x,), strict=False).module(),
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
}
_TRACED_WRITES = (
    *("copy_", "setitem", "iadd", "data.copy_", "data[:]", "init of data", "init", "row", "t", "mT", "detach", "view"),
    *("chunk", "split", "expand", "chain", "to", "out", "foreach", "foreach of a view", "masked_fill_", "Parameter"),
)


@pytest.mark.parametrize("trace", _TRACES.values(), ids=_TRACES)
def test_writes_through_weight_in_a_traced_model(trace: Callable[..., Any]) -> None:
    x = torch.randn(3, 96)
    for name in _TRACED_WRITES:

        def write(weight: Tensor, x: Tensor, name: str = name) -> Tensor:
            _WRITES[name](weight)
            return x

        with torch.no_grad(), pytest.raises(RuntimeError, match="load_float_.*update_.*dequantize"):
            trace(_Using(write), x)(x)


def test_writes_through_weight_exported_in_inference_mode() -> None:
    """Tensors have no version counters there."""
    x = torch.randn(3, 96)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="load_float_.*update_.*dequantize"):
        _TRACES["export"](_Using(lambda weight, x: weight.t().zero_()), x)


@pytest.mark.parametrize("trace", _TRACES.values(), ids=_TRACES)
def test_reads_of_weight_in_a_traced_model(trace: Callable[..., Any]) -> None:
    def read(weight: Tensor, x: Tensor) -> list[Tensor]:
        x = x.to(weight.device, weight.dtype)
        products = [nn.functional.linear(x, weight), x @ weight.T, (x @ weight.mT).mul_(2), x[:, :1] * weight[0, 0]]
        views = [weight.split(8)[1], weight.unflatten(0, (8, 5)), weight.data[1:3, None], weight.t(), weight.view(-1)]
        values = [weight.norm(dim=1), 1 - weight, weight**2, torch.cat([weight, x]), weight.max(dim=1)[0]]
        values.append(torch._foreach_add([x, weight], [x, weight])[1])
        return [*products, *(view + 1 for view in views), *values, weight.clone().zero_()]

    model, x = _Using(read), torch.randn(3, 96)
    with torch.no_grad():
        results = trace(model, x)(x)
    expected = read(model.layer.dequantize(torch.float32), x)
    assert len(results) == len(expected)
    for actual, wanted in zip(results, expected, strict=True):
        assert type(actual) is Tensor
        torch.testing.assert_close(actual, wanted)
