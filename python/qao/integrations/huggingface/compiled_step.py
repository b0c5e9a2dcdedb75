"""Compiled decoding step of ``generate()``, which checks the model's modules once per call instead of once per token.

For every call, Dynamo tests whether the attributes of all modules are those that it compiled for. A language model has
thousands of these guards, and they take a millisecond per token. Nothing changes a model while ``generate()`` runs.
Therefore ``generate()`` compares the attributes once, when it starts, and compiles again after a change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any
from weakref import ref

import torch

_VALUES = bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size
_numbers = itertools.count()


class CompiledStep:
    """``torch.compile`` of one model's call."""

    def __init__(self, model: torch.nn.Module, config: Any) -> None:
        arguments = config.to_dict()
        mode = arguments.pop("mode", None)
        options = dict(torch._inductor.list_mode_options(mode)) if mode else {}
        options["guard_filter_fn"] = torch.compiler.skip_guard_on_all_nn_modules_unsafe
        self.config = config
        self._model, self._state = ref(model), _state_of(model)
        self._call = torch.compile(_function_of(model), **arguments | {"options": options})

    def fits(self, model: torch.nn.Module, config: Any) -> bool:
        """Whether the compiled graphs are of this model as it is now."""
        return self._model() is model and bool(self.config == config) and self._state == _state_of(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of the model, or a saved one, compiles for itself
        return type(None), ()


def takes(config: Any) -> bool:
    """Whether ``CompiledStep`` compiles with this configuration: backend "qao", without options."""
    return config.backend == "qao" and not config.options


def _function_of(model: torch.nn.Module) -> Callable[..., Any]:
    """A function with separate code. Dynamo stores graphs by code, and those of one model must not serve another."""
    reference = ref(model)

    def step(*args: Any, **kwargs: Any) -> Any:
        return reference()(*args, **kwargs)  # type: ignore[misc]

    code = step.__code__.replace(co_name=f"step_{next(_numbers)}")
    return FunctionType(code, step.__globals__, "step", step.__defaults__, step.__closure__)


def _state_of(model: torch.nn.Module) -> list[Any]:
    """Everything in a model that its graph may depend on: modules, their tensors and attributes."""
    seen: set[int] = set()
    return [
        (name, id(module), type(module), id(type(module).forward), *_attributes(vars(module), seen))
        for name, module in model.named_modules()
    ]


def _attributes(attributes: Mapping[str, Any], seen: set[int]) -> Iterator[Any]:
    for name, value in attributes.items():
        if name in ("_parameters", "_buffers"):
            for key, tensor in value.items():
                yield key, id(tensor), *(() if tensor is None else _form(tensor))
        elif name not in ("_modules", "_compiled_call", "_last_compile_config"):
            yield name, _content(value, seen)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape, tensor.requires_grad


def _content(value: Any, seen: set[int]) -> Any:
    """Plain values by value, other objects by identity; of configurations their attributes, too."""
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, Mapping):
        return [(id(key) if not isinstance(key, _VALUES) else key, _content(one, seen)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return [_content(one, seen) for one in value]
    if isinstance(value, (set, frozenset)) and all(isinstance(one, _VALUES) for one in value):
        return frozenset(value)
    if hasattr(value, "to_diff_dict") and id(value) not in seen:  # a configuration of transformers
        seen.add(id(value))
        return id(value), *_attributes(vars(value), seen)
    return id(value)
