"""Adapters for user functions of a layer's name and module."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from .. import _moved

T = TypeVar("T")

_NAME = {"name", "fqn", "n", "key", "path", "qualname", "prefix"}
_MODULE = {"module", "mod", "m", "layer", "linear", "lin", "l", "model", "child", "submodule"}


def by_name_and_module(function: Callable[..., T], what: str) -> Callable[[str, nn.Module], T]:
    """``function`` of (name, module) or of (module, name) as a function of (name, module).

    The order follows from the annotations (str, nn.Module) or the names of the first two parameters; one of them is
    enough. It is never guessed: a wrong order would rarely raise and would leave every layer unquantized.

    Raises:
        TypeError: the order is unclear, or it does not take two arguments; the message begins with ``what``.
    """
    signature = _signature(function, what)
    if signature is None:
        raise TypeError(f"{what}: {function!r} has no signature that shows the order of its arguments; {_REMEDY}")
    first = _first_meaning(signature)
    if first is None:
        unclear = f"whether ({_names(signature)}) is (name, module) or (module, name) is unclear"
        raise TypeError(f"{what}: {unclear}; {_REMEDY}")
    return function if first == "name" else _swapped(function)


_REMEDY = "call its parameters `name` and `module`, in either order, or annotate them as str and nn.Module"


def layer_filter(
    filter_fn: Callable[[nn.Module, str], bool] | None, filter: Callable[..., bool] | None, caller: str
) -> Callable[[nn.Module, str], bool] | None:
    """``filter_fn``, checked, or its deprecated alias ``filter``, which takes either order; None without either.

    Raises:
        TypeError: both are given; ``filter_fn`` is no function of two arguments, or its signature shows (name, module);
            or the order of ``filter`` is unclear.
    """
    if filter is not None:
        if filter_fn is not None:
            raise TypeError(f"{caller}: filter is the old name of filter_fn; pass only filter_fn")
        # 5: the caller of a function that modes.neutral decorates
        _moved.warn(f"qao.{caller}(filter=...)", "filter_fn(module, fqn)", stacklevel=5)
        return _swapped(by_name_and_module(filter, f"{caller}: filter"))
    if filter_fn is not None:
        if not callable(filter_fn):
            raise TypeError(f"{caller}: filter_fn must be a function of (module, fqn), not {filter_fn!r}")
        signature = _signature(filter_fn, f"{caller}: filter_fn")
        if signature is not None and _first_meaning(signature) == "name":
            raise TypeError(
                f"{caller}: filter_fn is called as filter_fn(module, fqn), but takes ({_names(signature)}): swap them"
            )
    return filter_fn


def _swapped(function: Callable[[Any, Any], T]) -> Callable[[Any, Any], T]:
    return lambda first, second: function(second, first)


def _signature(function: Callable[..., Any], what: str) -> inspect.Signature | None:
    """None for C functions without one. Raises TypeError if it does not take two arguments."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return None
    try:
        signature.bind("name", "module")
    except TypeError as error:
        raise TypeError(
            f"{what} is called with a name and a module, but takes ({_names(signature)}): {error}"
        ) from None
    return signature


def _first_meaning(signature: inspect.Signature) -> str | None:
    """ "name" or "module" for the first of two parameters; None if unclear."""
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY][:2]
    meanings = [_meaning(parameter) for parameter in parameters]
    if meanings in (["name", "module"], ["name", None], [None, "module"]):
        return "name"
    return "module" if meanings in (["module", "name"], ["module", None], [None, "name"]) else None


def _names(signature: inspect.Signature) -> str:
    return ", ".join(str(parameter) for parameter in signature.parameters.values())


def _meaning(parameter: inspect.Parameter) -> str | None:
    """ "name", "module", or None if unclear."""
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return None
    annotation: Any = parameter.annotation
    if annotation is str or annotation == "str":
        return "name"
    if isinstance(annotation, type) and issubclass(annotation, nn.Module):
        return "module"
    if isinstance(annotation, str) and re.fullmatch(r"(\w+\.)*(Module|Linear)", annotation):
        return "module"
    words = set(parameter.name.lower().split("_"))
    if words & _NAME:  # also layer_name and module_name
        return "name"
    return "module" if words & _MODULE else None
