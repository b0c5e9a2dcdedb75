"""Wrappers around functions of other libraries."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the function ``owner.name`` by ``make(function)``, once. A static or class method stays one."""
    held = inspect.getattr_static(owner, name)
    upstream = held.__func__ if isinstance(held, (staticmethod, classmethod)) else held
    if getattr(upstream, "_of_qao", False):
        return
    own: Any = functools.wraps(upstream)(make(upstream))
    own._of_qao = True
    setattr(owner, name, own if held is upstream else type(held)(own))
