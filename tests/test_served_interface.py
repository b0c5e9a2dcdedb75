"""Checks of a serving engine's interfaces; without an engine."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any

import pytest
from qao.integrations.serving.interface import InterfaceError, check_class, function_of, unknown_fields


class Engine(ABC):
    """A class of an engine."""

    @classmethod
    @abstractmethod
    def can(cls, config: Any) -> bool: ...

    @abstractmethod
    def apply(self, x: Any, bias: Any = None) -> Any: ...

    @property
    def size(self) -> int:
        return 1


def of_qao(*bases: type, **methods: Any) -> type:
    return type("Ours", bases or (Engine,), {"__module__": "qao.ours", **METHODS, **methods})


METHODS: dict[str, Any] = {
    "can": classmethod(lambda cls, config: True),
    "apply": lambda self, x, bias=None: x,
    "size": property(lambda self: 2),
    "_own": lambda self: None,
}


def test_a_class_that_fits() -> None:
    check_class(of_qao())
    check_class(of_qao(apply=lambda self, *args: None, gate=lambda self: None), "gate")
    check_class(of_qao(of_qao(), apply=lambda self, x, bias=None, more=None: None))


@pytest.mark.parametrize(
    ("methods", "cause"),
    [
        ({"gate": lambda self: None}, "Engine.gate is missing"),
        ({"apply": lambda self, x: None}, "Engine.apply has a new parameter bias"),
        ({"apply": lambda self, x, bias, scale: None}, "Engine.apply has no parameter scale"),
        ({"can": classmethod(lambda cls, c: True)}, "Engine.can has a new parameter config"),
    ],
)
def test_a_class_that_does_not_fit(methods: dict[str, Any], cause: str) -> None:
    with pytest.raises(InterfaceError, match=cause):
        check_class(of_qao(**methods))


def test_abstract_methods_that_remain() -> None:
    newer = type("Newer", (Engine,), {"__module__": "engine", "quantize": abstractmethod(lambda self: None)})
    with pytest.raises(InterfaceError, match="Newer has a new method quantize"):
        check_class(of_qao(newer))


def three(weight: Any, scale: Any = None) -> Any:
    return None


three.__annotations__["return"] = tuple[int, int, int] | None


def test_functions() -> None:
    owner = SimpleNamespace(__name__="engine.module", three=three, number=3)
    assert function_of(owner, "three", "scale", results=3) is three
    for name, parameters, results, cause in (
        ("four", (), None, "engine.module.four is missing"),
        ("number", (), None, "engine.module.number is missing"),
        ("three", ("weight", "bias"), None, "engine.module.three has no parameter bias"),
        ("three", (), 4, "engine.module.three returns 3 values, not 4"),
    ):
        with pytest.raises(InterfaceError, match=cause):
            function_of(owner, name, *parameters, results=results)


def test_fields_that_are_unknown() -> None:
    made = dataclasses.make_dataclass("Config", ["bits", ("order", Any, None), ("outliers", Any, None)])
    assert unknown_fields(made(4), {"bits"}) is None
    assert unknown_fields(made(4, "group", 3), {"bits"}) == "an unknown property of the layer (order, outliers)"
    assert unknown_fields(made(4), {"order"}) == "an unknown property of the layer (bits)"
