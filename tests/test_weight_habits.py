"""What users of nn.Linear do with a layer: each gives what an nn.Linear of the same numbers gives, or an error."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import qao
import torch
from torch import Tensor, nn


@pytest.fixture(params=[qao.Int4WeightOnly(group_size=32), qao.Float8WeightOnly()], ids=str)
def pair(request: pytest.FixtureRequest) -> tuple[Any, nn.Linear]:
    """A quantized layer and the nn.Linear of its numbers."""
    torch.manual_seed(0)
    layer = qao.QuantLinear.from_linear(nn.Linear(64, 40), request.param)
    linear = layer.to_float()
    assert isinstance(linear, nn.Linear) and torch.equal(linear.weight, layer.dequantize(torch.float32))
    return layer, linear


def reloaded(tensor: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


SAME: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda layer: (layer.weight.dtype, layer.bias.dtype),
    "device": lambda layer: (layer.weight.device, layer.weight.is_cuda, layer.weight.get_device()),
    "shape": lambda layer: (layer.weight.shape, layer.weight.size(0), layer.weight.ndim, layer.weight.dim()),
    "len": lambda layer: len(layer.weight),
    "strides": lambda layer: (layer.weight.stride(), layer.weight.is_contiguous(), layer.weight.storage_offset()),
    "numel": lambda layer: (layer.weight.numel(), layer.weight.nbytes, layer.weight.element_size()),
    "kind": lambda layer: (layer.weight.is_floating_point(), layer.weight.is_complex(), torch.is_tensor(layer.weight)),
    "layout": lambda layer: (layer.weight.layout, layer.weight.is_sparse, layer.weight.is_meta),
    "gradient": lambda layer: (layer.weight.requires_grad, layer.weight.grad, layer.weight.is_leaf),
    "features": lambda layer: (layer.in_features, layer.out_features, layer.training),
    "clone": lambda layer: layer.weight.clone(),
    "deepcopy": lambda layer: copy.deepcopy(layer.weight).detach(),
    "deepcopy of the layer": lambda layer: copy.deepcopy(layer).weight.clone(),
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer.weight)).detach(),
    "save": lambda layer: reloaded(layer.weight).detach(),
    "to": lambda layer: layer.weight.to(torch.float16),
    "half": lambda layer: layer.weight.half(),
    "cpu": lambda layer: layer.weight.cpu() + 0,
    "double": lambda layer: layer.weight.double(),
    "to of the layer": lambda layer: layer.to(torch.bfloat16).weight.dtype,
    "meta": lambda layer: layer.to("meta").weight.is_meta,
    "type_as": lambda layer: torch.zeros(1, dtype=torch.int64).type_as(layer.weight),
    "norm": lambda layer: (layer.weight.norm(), torch.linalg.norm(layer.weight), layer.weight.norm(dim=1)),
    "statistics": lambda layer: (layer.weight.mean(), layer.weight.std(), layer.weight.abs().max().item()),
    "isnan": lambda layer: layer.weight.isnan().any().item(),
    "T": lambda layer: (layer.weight.T + 0, layer.weight.t() @ layer.weight),
    "index": lambda layer: (layer.weight[3] + 0, layer.weight[-1, 2].item(), layer.weight[:2, ::3] + 0),
    "mask": lambda layer: (layer.weight[layer.weight > 0], layer.weight[torch.tensor([1, 1])]),
    "iterate": lambda layer: [row.sum() for row in layer.weight],
    "equal": lambda layer: torch.equal(layer.weight, layer.weight.clone()),
    "allclose": lambda layer: torch.allclose(layer.weight, layer.weight * 1.0),
    "compare": lambda layer: (layer.weight == layer.weight).all().item(),
    "arithmetic": lambda layer: (2 * layer.weight + 1, layer.weight @ torch.ones(64), layer.weight**2),
    "linear": lambda layer: nn.functional.linear(torch.ones(64), layer.weight, layer.bias),
    "einsum": lambda layer: torch.einsum("nk,k->n", layer.weight, torch.ones(64)),
    "svd": lambda layer: torch.linalg.svdvals(layer.weight),
    "cat": lambda layer: torch.cat([layer.weight, layer.weight]),
    "like": lambda layer: (torch.zeros_like(layer.weight), layer.weight.new_ones(3)),
    "numpy": lambda layer: layer.weight.detach().numpy().sum(),
    "tolist": lambda layer: layer.weight.tolist(),
    "format": lambda layer: f"{layer.weight[0, 0]:.4f}",
    "quantile": lambda layer: layer.weight.quantile(0.5).item(),
    "Parameter of a copy": lambda layer: nn.Parameter(layer.weight.clone()).detach(),
    "bias": lambda layer: (layer.bias.shape, layer.bias + 1, layer.bias.requires_grad_().requires_grad),
    "eval": lambda layer: layer.eval().training,
    "zero_grad": lambda layer: layer.zero_grad(),
    "hasattr": lambda layer: (hasattr(layer, "weight"), hasattr(layer, "bias"), hasattr(layer, "ds_id")),
    "getattr": lambda layer: getattr(layer, "weight").shape,  # noqa: B009
}


@pytest.mark.parametrize("habit", SAME.values(), ids=SAME)
def test_what_a_linear_layer_gives(habit: Callable[[Any], Any], pair: tuple[Any, nn.Linear]) -> None:
    layer, linear = pair
    with torch.no_grad():
        same(habit(layer), habit(linear))


def same(actual: Any, expected: Any) -> None:
    if isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            same(one, other)
    elif isinstance(expected, Tensor):
        assert isinstance(actual, Tensor)
        torch.testing.assert_close(actual, expected)
    else:
        assert actual == expected


ERRORS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "data_ptr": (lambda layer: layer.weight.data_ptr(), r"layer\.dequantize\(\)"),
    "storage": (lambda layer: layer.weight.untyped_storage(), r"layer\.dequantize\(\)"),
    "requires_grad_": (lambda layer: layer.weight.requires_grad_(), r"qao\.dequantize_\(model\)"),
    "fill": (lambda layer: layer.weight.data.fill_(0), r"layer\.load_float_\(weight\)"),
    "init": (lambda layer: nn.init.xavier_uniform_(layer.weight), r"layer\.load_float_\(weight\)"),
    "Parameter": (lambda layer: nn.Parameter(layer.weight), r"layer\.dequantize\(\)"),
    "assign": (lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(40, 64))), r"qao\.dequantize_\(model\)"),
    "optimizer": (lambda layer: torch.optim.SGD([layer.weight.requires_grad_()]), r"qao\.dequantize_\(model\)"),
}


@pytest.mark.parametrize("habit, remedy", ERRORS.values(), ids=ERRORS)
def test_what_only_a_float_weight_can_do(habit: Callable[[Any], Any], remedy: str, pair: tuple[Any, nn.Linear]) -> None:
    layer, linear = pair
    with pytest.raises((RuntimeError, AttributeError), match=remedy):
        habit(layer)
    assert torch.equal(layer.weight, linear.weight)
