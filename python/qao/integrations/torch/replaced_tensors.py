"""Functions of torch that replace tensors of a module without asking it: checks for quantized layers.

``functional_call`` and ``swap_tensors`` bypass ``Module.__setattr__``, and packed tensors of several sizes have the
same shape, so a weight of another size would compute something else without an error. Parametrizations and
``vector_to_parameters`` would leave a layer that cannot run. Everything is checked before the layer changes.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import convert_parameters, parametrizations, parametrize, stateless

from ...nn import marker
from ...nn.dequantized_weight import DequantizedWeight
from ...nn.packed_module import PackedModule
from ...nn.saved_codes import check_copy
from ...schemes import PackedWeight
from ..wrapping import wrap


def register() -> None:
    """Called by ``import qao``."""
    # As attributes of torch.nn.utils these modules are hidden by functions of the same names.
    weight_norm, spectral_norm = (
        importlib.import_module(f"torch.nn.utils.{name}") for name in ("weight_norm", "spectral_norm")
    )
    for owner, name in (
        (weight_norm.WeightNorm, "apply"),
        (spectral_norm.SpectralNorm, "apply"),
        (parametrizations, "spectral_norm"),  # fails for integers before it registers
        (parametrize, "register_parametrization"),
    ):
        wrap(owner, name, _reparametrization)
    wrap(stateless, "_functional_call", _functional_call)
    wrap(torch.utils, "swap_tensors", _swap_tensors)
    wrap(nn.Parameter, "copy_", _copy)
    wrap(convert_parameters, "vector_to_parameters", _vector_to_parameters)
    nn.utils.vector_to_parameters = convert_parameters.vector_to_parameters


def _reparametrization(upstream: Any) -> Any:
    parameters = inspect.signature(upstream)

    def register(*args: Any, **options: Any) -> Any:
        given = parameters.bind(*args, **options)
        given.apply_defaults()
        module, name, *_ = given.arguments.values()
        if isinstance(module, PackedModule):
            module.refuse_reparametrization(name, upstream.__qualname__)
        return upstream(*args, **options)

    return register


# ---- functional_call -------------------------------------------------------------------------------------------------

_ENTRIES = (*PackedWeight._fields, marker.MARKER)


def _functional_call(upstream: Any) -> Any:
    def functional_call(
        module: nn.Module, parameters_and_buffers: dict[str, Tensor], *args: Any, **options: Any
    ) -> Any:
        if torch.compiler.is_compiling():
            return upstream(module, parameters_and_buffers, *args, **options)
        given = _without_markers(module, parameters_and_buffers)
        result = upstream(module, given, *args, **options)
        parameters_and_buffers.update(given)  # torch has put buffers there that the call has replaced
        return result

    return functional_call


def _without_markers(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without a state dict's entries that are no Parameters. Raises ValueError if they do not fit."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, entry = name.rpartition(".")
        if entry in _ENTRIES:
            layers.setdefault(layer, {})[entry] = tensor
    if not layers:
        return tensors
    modules = dict(model.named_modules(remove_duplicate=False))
    left_out = set()
    for layer, given in layers.items():
        module, prefix = modules.get(layer), f"{layer}." if layer else ""
        if isinstance(module, PackedModule):
            module.check_given(given, prefix)
            if marker.MARKER in given:
                left_out |= {prefix + marker.MARKER, prefix + marker.TRIPWIRE}
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _swap_tensors(upstream: Any) -> Any:
    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        for tensor in (t1, t2):
            if isinstance(tensor, DequantizedWeight):
                tensor.refuse_write("torch.utils.swap_tensors")
        _check_swap(t1, t2)
        upstream(t1, t2)

    return swap_tensors


def _check_swap(one: Tensor, other: Tensor) -> None:
    sizes = [getattr(tensor, "packed_sizes", None) for tensor in (one, other)]
    if sizes == [None, None]:
        return
    alike = one.dtype == other.dtype or (one.is_floating_point() and other.is_floating_point())
    if one.shape != other.shape or not alike or (None not in sizes and sizes[0] != sizes[1]):
        whats = (
            f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            + (f" of a weight {list(of)}" if of else "")
            for tensor, of in zip((one, other), sizes, strict=True)
        )
        raise ValueError(
            f"torch.utils.swap_tensors: {' and '.join(whats)}: a tensor of a quantized layer can only be swapped with "
            "one of the same size. Replace the layer itself in its parent module."
        )


def _copy(upstream: Any) -> Any:
    def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
        if hasattr(self, "packed_sizes"):
            check_copy(self, src)
        copied: Tensor = upstream(self, src, non_blocking)
        return copied

    return copy_


def _vector_to_parameters(upstream: Any) -> Any:
    def vector_to_parameters(vec: Tensor, parameters: Iterable[Tensor]) -> None:
        parameters = list(parameters)
        if any(hasattr(parameter, "packed_sizes") for parameter in parameters):
            raise TypeError(
                "vector_to_parameters: among the parameters are packed tensors of quantized layers, which would become "
                "floats. Use the trainable ones in both directions: [p for p in model.parameters() if p.requires_grad]."
            )
        upstream(vec, parameters)

    return vector_to_parameters
