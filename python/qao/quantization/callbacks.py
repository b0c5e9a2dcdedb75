"""Adapter for user functions of a name and a module, with arguments in either order."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

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
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some C functions have no signature
        raise TypeError(
            f"{what}: {function!r} has no signature that shows the order of its arguments; {_REMEDY}"
        ) from None
    try:
        signature.bind("name", "module")
    except TypeError as error:
        raise TypeError(
            f"{what} is called with a name and a module, but takes ({_names(signature)}): {error}"
        ) from None
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY][:2]
    meanings = [_meaning(parameter) for parameter in parameters]
    if meanings in (["name", "module"], ["name", None], [None, "module"]):
        return function
    if meanings in (["module", "name"], ["module", None], [None, "name"]):
        return lambda name, module: function(module, name)
    raise TypeError(f"{what}: whether ({_names(signature)}) is (name, module) or (module, name) is unclear; {_REMEDY}")


_REMEDY = "call its parameters `name` and `module`, in either order, or annotate them as str and nn.Module"


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
