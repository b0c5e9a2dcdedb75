"""Wrappers around functions of other libraries."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the function ``owner.name`` by ``make(function)``, once.

    A static or class method stays one. Of a property, the function is the one that reads it.
    """
    held = inspect.getattr_static(owner, name)
    kinds = {staticmethod: "__func__", classmethod: "__func__", property: "fget"}
    upstream = getattr(held, kinds[type(held)]) if type(held) in kinds else held
    if getattr(upstream, "_of_qao", False):
        return
    own: Any = functools.wraps(upstream)(make(upstream))
    own._of_qao = True
    setattr(owner, name, own if held is upstream else type(held)(own))
