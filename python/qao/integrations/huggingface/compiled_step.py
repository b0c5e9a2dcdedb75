"""Compiled decoding step of ``generate()``, which checks the model's modules once per call instead of once per token.

For every call, Dynamo tests whether the attributes of all modules are those that it compiled for. A language model has
thousands of these guards, and they take a millisecond per token. Nothing changes a model while ``generate()`` runs.
Therefore ``generate()`` compares the attributes once, when it starts, and compiles again after a change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from types import FunctionType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from .decoding_loop import Buffers, step, waiting

_PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
_NOT_READ = {"_modules", "_compiled_call", "_last_compile_config"}
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
        self._compile = partial(torch.compile, **arguments | {"options": options})
        self.buffers: Buffers | None = None  # of ``decode``

    def fits(self, model: torch.nn.Module, config: Any) -> bool:
        """Whether the compiled graphs are of this model as it is now."""
        return self._model() is model and bool(self.config == config) and self._state == _state_of(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loop = waiting()
        if loop is not None and not args:
            loop.take_over(self, kwargs)
        return self._call(*args, **kwargs)

    @cached_property
    def _call(self) -> Callable[..., Any]:
        return self._compile(_function_of(self._model, lambda model, *args, **kwargs: model(*args, **kwargs)))

    @cached_property
    def decode(self) -> Callable[..., Tensor]:
        """``decoding_loop.step`` of this model."""
        return self._compile(_function_of(self._model, step))

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of the model, or a saved one, compiles for itself
        return type(None), ()


def takes(config: Any) -> bool:
    """Whether ``CompiledStep`` compiles with this configuration: backend "qao", without options."""
    return config.backend == "qao" and not config.options


def _function_of(model: ref[torch.nn.Module], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of a model, with separate code. Dynamo stores graphs by code: those of one model serve no other."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(model(), *args, **kwargs)

    code = call.__code__.replace(co_name=f"step_{next(_numbers)}")
    return FunctionType(code, call.__globals__, "step", call.__defaults__, call.__closure__)


def _state_of(model: torch.nn.Module) -> list[Any]:
    """Everything in a model that its graph may depend on: modules, their tensors and attributes."""
    state: list[Any] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        state += name, id(module), type(module), id(type(module).forward)
        _add_attributes(vars(module), state, seen)
    return state


def _add_attributes(attributes: Mapping[str, Any], state: list[Any], seen: set[int]) -> None:
    for name, value in attributes.items():
        if name == "_parameters" or name == "_buffers":
            for key, tensor in value.items():
                state += key, id(tensor)
                if tensor is not None:
                    state += tensor.dtype, tensor.device, tensor.shape, tensor.requires_grad
        elif name == "_cache":  # that generate() made last, in version 4
            state.append([getattr(layer, "max_cache_len", None) for layer in getattr(value, "layers", [])])
        elif name not in _NOT_READ:
            state.append(name)
            _add(value, state, seen)


def _add(value: Any, state: list[Any], seen: set[int]) -> None:
    """Plain values by value, other objects by identity; of configurations their attributes, too."""
    kind = type(value)
    if kind in _PLAIN:
        state.append(value)
    elif isinstance(value, (Mapping, list, tuple)):
        state += kind, len(value)
        for one in value.items() if isinstance(value, Mapping) else value:
            _add(one, state, seen)
    elif isinstance(value, (set, frozenset)):
        state.append(frozenset(one if type(one) in _PLAIN else id(one) for one in value))
    else:
        state.append(id(value))
        if hasattr(value, "to_diff_dict") and id(value) not in seen:  # a configuration of transformers
            seen.add(id(value))
            _add_attributes(vars(value), state, seen)
