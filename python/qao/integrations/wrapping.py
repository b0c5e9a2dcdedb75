"""Wrappers around functions of other libraries."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the function ``owner.name`` by ``make(function)``, once. A static or class method stays one."""
    held = inspect.getattr_static(owner, name)
    theirs = held.__func__ if isinstance(held, (staticmethod, classmethod)) else held
    if getattr(theirs, "_of_qao", False):
        return
    own: Any = functools.wraps(theirs)(make(theirs))
    own._of_qao = True
    setattr(owner, name, own if held is theirs else type(held)(own))
