"""Checks of a serving engine's interfaces, which differ between versions and are not guaranteed to be stable.

A part of qao checks what it relies on before it changes anything, and is left out if the check fails. No check depends
on the number of a version.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Collection
from typing import Any


class InterfaceError(RuntimeError):
    """An interface of the engine is missing or differs from those that qao knows."""


def function_of(owner: Any, name: str, *parameters: str, results: int | None = None) -> Any:
    """The function ``owner.name``, which must have these parameters.

    Args:
        results: the number of values it returns, if its annotation says so.

    Raises:
        InterfaceError: it has not.
    """
    function = getattr(owner, name, None)
    where = f"{owner.__name__}.{name}"
    if not callable(function):
        raise InterfaceError(f"{where} is missing")
    if lacking := [one for one in parameters if one not in inspect.signature(function).parameters]:
        raise InterfaceError(f"{where} has no parameter {' or '.join(lacking)}")
    returned = inspect.signature(function).return_annotation
    for one in (returned, *typing.get_args(returned)):
        if results is not None and typing.get_origin(one) is tuple and len(typing.get_args(one)) != results:
            raise InterfaceError(f"{where} returns {len(typing.get_args(one))} values, not {results}")
    return function


def check_class(kind: type, *own: str) -> None:
    """Check that a class of qao implements the engine's classes that it extends.

    Every public method except ``own`` must override one and accept its arguments, and no abstract method may remain.

    Raises:
        InterfaceError: it does not.
    """
    ours = [one for one in kind.__mro__ if one.__module__.startswith("qao.")]
    theirs = [one for one in kind.__mro__ if one not in ours]
    if abstract := getattr(kind, "__abstractmethods__", None):
        raise InterfaceError(f"{theirs[0].__name__} has a new method {' and '.join(sorted(abstract))}")
    for one in ours:
        for name, held in vars(one).items():
            if name in own or name.startswith("_") or not callable(_function(held)):
                continue
            base = next((other for other in theirs if name in vars(other)), None)
            if base is None:
                raise InterfaceError(f"{theirs[0].__name__}.{name} is missing")
            _check_override(f"{base.__name__}.{name}", _function(held), _function(vars(base)[name]))


def _function(held: Any) -> Any:
    held = held.fget if isinstance(held, property) else held
    return held.__func__ if isinstance(held, (staticmethod, classmethod)) else held


_RECEIVERS = {"self", "cls"}
_VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def _check_override(where: str, ours: Any, theirs: Any) -> None:
    taken, given = (inspect.signature(one).parameters for one in (ours, theirs))
    variadic = [any(one.kind in _VARIADIC for one in parameters.values()) for parameters in (taken, given)]
    named = [{name for name, one in parameters.items() if one.kind not in _VARIADIC} for parameters in (taken, given)]
    if (new := named[1] - named[0] - _RECEIVERS) and not variadic[0]:
        raise InterfaceError(f"{where} has a new parameter {' and '.join(sorted(new))}")
    required = {name for name in named[0] - _RECEIVERS if taken[name].default is inspect.Parameter.empty}
    if (gone := required - named[1]) and not variadic[1]:
        raise InterfaceError(f"{where} has no parameter {' or '.join(sorted(gone))}")


def unknown_fields(config: Any, known: Collection[str]) -> str | None:
    """The fields of a dataclass that differ from their defaults and are not ``known``, as a reason; None without any.

    They may ask for something that qao does not compute.
    """
    others = [one for one in dataclasses.fields(config) if one.name not in known]
    found = [one.name for one in others if getattr(config, one.name) != one.default]
    return f"an unknown property of the layer ({', '.join(found)})" if found else None
