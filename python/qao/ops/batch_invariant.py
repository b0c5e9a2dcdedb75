"""``batch_invariant()``: products in which a row of y has the same bits whatever rows x has beside it.

The operators have an argument of that name, so that a graph holds what was asked for when it was made; products of
layers pass on what holds where they are called or traced.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any


class _Mode:
    on = False


MODE = _Mode()


class batch_invariant:  # noqa: N801  # used as a function, as torch.no_grad is
    """A context in which products of quantised layers, forward, are batch-invariant: y[i] depends on x[i] and W alone.

    Kernels are then chosen without a look at the number of rows, which costs time (docs/numerics.md). The context is
    that of the process, not of a thread. Graphs keep what held when they were traced; torch.compile traces again
    where that is another.

    Args:
        enabled: False for products as they are outside.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.before = False

    def __enter__(self) -> None:
        self.before = MODE.on
        MODE.on = self.enabled

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        MODE.on = self.before


_DEFAULTS: dict[Any, tuple[Any, ...]] = {}  # of an operator's arguments up to batch_invariant; None: there is none


def note_arguments(operator: Any) -> None:
    """Makes a product known to ``with_mode``."""
    arguments = operator._schema.arguments
    place = [argument.name for argument in arguments].index("batch_invariant")
    _DEFAULTS[operator] = tuple(argument.default_value for argument in arguments[: place + 1])


def with_mode(operator: Any, arguments: tuple[Any, ...], mode: bool) -> tuple[Any, ...]:
    """A product's arguments with ``batch_invariant`` as asked for or, if that is more, as ``mode``."""
    defaults = _DEFAULTS[operator]
    place = len(defaults) - 1
    if len(arguments) <= place:
        return *arguments, *defaults[len(arguments) : place], mode
    return *arguments[:place], arguments[place] or mode, *arguments[place + 1 :]


def asked(batch_invariant: bool, *others: Any) -> tuple[Any, ...]:
    """That argument, and those behind it, where one is given; without it the mode decides."""
    return (batch_invariant, *others) if batch_invariant or any(others) else ()
