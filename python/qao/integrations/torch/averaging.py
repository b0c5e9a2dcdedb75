"""torch.optim.swa_utils: AveragedModel (EMA, SWA) of a quantized model averages only float parameters.

Its functions average all parameters in float and write them back, which truncates integers: 0.9 q + 0.1 q becomes q - 1
for many q.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from ...nn.packed_module import PackedModule
from ...ops.modes import writing


def register() -> None:
    """Called after torch.optim is imported."""
    update = swa_utils.AveragedModel.update_parameters

    @functools.wraps(update)
    def update_parameters(self: Any, model: nn.Module) -> None:
        found, wanted = _packed(self.module), _packed(model)
        if not wanted:
            update(self, model)
            return
        _synchronize(found, wanted, bool(self.n_averaged == 0))
        left_out = {id(tensor) for tensor in (*found.values(), *wanted.values())}
        with contextlib.ExitStack() as stack:
            for module in (self, self.module, model):
                stack.enter_context(_without(module, left_out))
            update(self, model)

    swa_utils.AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]


def _packed(model: nn.Module) -> dict[str, Tensor]:
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, PackedModule)]
    every = ((f"{name}.{key}", tensor) for name, layer in layers for key, tensor in layer.packed.tensors().items())
    return {name: tensor for name, tensor in every if tensor is not None}


@torch.no_grad()
def _synchronize(found: dict[str, Tensor], wanted: dict[str, Tensor], first: bool) -> None:
    """``first``: nothing is averaged yet, so the model may have other weights than the copy."""
    if found.keys() != wanted.keys():
        name = min(found.keys() ^ wanted.keys())
        raise ValueError(
            f"AveragedModel: {name} is quantized in only one of the two models. Quantize before AveragedModel."
        )
    for name, upstream in wanted.items():
        own = found[name]
        local, other = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in (own, upstream))
        if torch.equal(local, other.to(local.device)):
            continue
        if not first:
            raise ValueError(
                f"AveragedModel: {name} has changed since averaging began, and packed weights cannot be averaged. "
                "Average the float model and quantize the result."
            )
        with writing(local):
            local.copy_(other)


@contextlib.contextmanager
def _without(module: nn.Module, left_out: set[int]) -> Iterator[None]:
    """``module.parameters()`` without some of them."""
    every = module.parameters

    def parameters(recurse: bool = True) -> Iterator[nn.Parameter]:
        return (parameter for parameter in every(recurse) if id(parameter) not in left_out)

    before = vars(module).get("parameters")
    vars(module)["parameters"] = parameters
    try:
        yield
    finally:
        del vars(module)["parameters"]
        if before is not None:
            vars(module)["parameters"] = before
