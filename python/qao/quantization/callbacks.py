"""Checks of user functions of a layer's module and its fully qualified name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from .. import _moved

T = TypeVar("T")

_NAME = {"name", "fqn", "n", "key", "path", "qualname", "prefix"}
_MODULE = {"module", "mod", "m", "layer", "linear", "model", "child", "submodule"}


def checked(function: Callable[[nn.Module, str], T], what: str) -> Callable[[nn.Module, str], T]:
    """``function``, which is called as function(module, fqn): the order of torchao's filter_fn.

    The other order would rarely raise and would leave every layer unquantized, so it is refused where the annotations
    or names of the parameters show it.

    Raises:
        TypeError: it is no function of two arguments, or it takes (name, module); the message begins with ``what``.
    """
    if not callable(function):
        raise TypeError(f"{what} must be a function of (module, fqn), not {function!r}")
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # a C function
        return function
    shown = ", ".join(str(parameter) for parameter in signature.parameters.values())
    try:
        signature.bind("module", "fqn")
    except TypeError as error:
        raise TypeError(f"{what} is called with a module and a name, but takes ({shown}): {error}") from None
    first, second = ([_meaning(one) for one in signature.parameters.values()] + [None])[:2]
    if first == "name" or (first is None and second == "module"):
        raise TypeError(f"{what} is called with (module, fqn), but takes ({shown}): swap them")
    return function


def layer_filter(
    filter_fn: Callable[[nn.Module, str], bool] | None, filter: Callable[[nn.Module, str], bool] | None, caller: str
) -> Callable[[nn.Module, str], bool] | None:
    """``filter_fn``, checked, or its deprecated alias ``filter``; None without either.

    Raises:
        TypeError: both are given, or as ``checked``.
    """
    if filter is not None:
        if filter_fn is not None:
            raise TypeError(f"{caller}: filter is the old name of filter_fn; pass only filter_fn")
        # 5: the caller of a function that modes.neutral decorates
        _moved.warn(f"qao.{caller}(filter=...)", stacklevel=5)
        return checked(filter, f"{caller}: filter")
    return None if filter_fn is None else checked(filter_fn, f"{caller}: filter_fn")


def _meaning(parameter: inspect.Parameter) -> str | None:
    """ "name", "module", or None if unclear."""
    annotation: Any = parameter.annotation
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return None
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
