"""docs/policy.md on deprecated names: each warns, names the version that removes it, and is gone in that version."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import qao
from qao import _moved
from torch import nn

SOURCES = Path(qao.__file__).parent
MINOR = tuple(map(int, qao.__version__.split(".")[:2]))
EVERY = {old: (new, since) for since, names in _moved.TABLE.items() for old, new in names.items()}
# Positional arguments of functions that look at them before the deprecated one.
GIVEN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "qao.quantize_": lambda: (nn.Linear(64, 64), qao.Int8WeightOnly()),
    "qao.calibrate": lambda: (nn.Linear(64, 64), [], qao.Int8WeightOnly()),
    "qao.diagnostics.sensitivity.by_layer": lambda: (nn.Linear(64, 64).eval(), [1, 2], qao.Int8WeightOnly()),
}
VALUES = {"filter": lambda module, fqn: False, "activation_scale": 0.5}


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def overdue(present: tuple[int, ...]) -> set[str]:
    """Names that a version must not have."""
    return {old for old, (_, since) in EVERY.items() if version(_moved.removal(since)) <= present}


@contextlib.contextmanager
def fresh(module: str) -> Iterator[None]:
    """Without the module in sys.modules and in its package, as before its first import."""
    package, _, name = module.rpartition(".")
    found, attribute = sys.modules.pop(module, None), vars(sys.modules[package]).pop(name, None)
    try:
        yield
    finally:
        sys.modules.pop(module, None)
        vars(sys.modules[package]).pop(name, None)
        if found is not None:
            sys.modules[module] = found
        if attribute is not None:
            setattr(sys.modules[package], name, attribute)


def use(old: str) -> None:
    """Use a deprecated name as a program does. What follows the warning does not matter."""
    function, bracket, rest = old.partition("(")
    if not bracket:
        parent, _, name = old.rpartition(".")
        if old in _moved._MOVED:
            with fresh(old):
                importlib.import_module(old)
        else:
            getattr(importlib.import_module(parent), name)
        return
    keyword = rest.partition("=")[0]
    home = next(place for place in (qao, qao.ops) if hasattr(place, function.removeprefix("qao.").split(".")[0]))
    importlib.import_module("qao.diagnostics.sensitivity")
    called: Any = functools.reduce(getattr, function.removeprefix("qao.").split("."), home)
    with contextlib.suppress(Exception):
        called(*GIVEN.get(function, tuple)(), **{keyword: VALUES.get(keyword)})


@pytest.mark.parametrize("old", EVERY)
def test_a_deprecated_name_warns_with_its_successor_and_the_version_that_removes_it(old: str) -> None:
    new, since = EVERY[old]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use(old)
    found = [warning for warning in caught if str(warning.message).startswith(f"{old} is now ")]
    assert [str(warning.message) for warning in found] == [
        f"{old} is now {new}; the old name will be removed in qao {_moved.removal(since)}"
    ]
    assert found[0].category is DeprecationWarning
    assert old in _moved._MOVED or found[0].filename == __file__


def test_a_successor_exists() -> None:
    for old, (new, _) in EVERY.items():
        if "(" not in old and old not in _moved._MOVED:
            parent, _, name = new.rpartition(".")
            assert hasattr(importlib.import_module(parent), name), new
        elif "(" not in old:
            assert importlib.util.find_spec(new), new


def test_a_deprecated_name_lives_two_minor_versions() -> None:
    """The version that removes a name has to remove it, and no version deprecates for a later one."""
    assert not overdue(MINOR), f"qao {qao.__version__} must not have these names: remove them, and from _moved.TABLE"
    assert overdue((0, 4)) >= set(_moved.TABLE["0.2"]) and not overdue((0, 3))
    assert _moved.removal("0.2") == "0.4"
    assert all(version(since) <= MINOR for since in _moved.TABLE)
    assert len(EVERY) == sum(map(len, _moved.TABLE.values()))


def test_only_the_table_deprecates() -> None:
    """A warning anywhere else would be checked by none of these tests."""
    others = [path for path in SOURCES.rglob("*.py") if path.name != "_moved.py" and "Deprecat" in path.read_text()]
    assert not others
