"""Which operator computes the gate between the projections of fused experts."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import ops
from .norm_silu import plain_swiglu

Gate = Callable[[Tensor], Tensor]


def gate_of(fused: Any, width: int) -> Gate | None:
    """The kernel that makes [S, width] of [S, 2 * width], the rows of the up projection, as the model's gate does.

    It is ``qao.ops.silu_mul`` of two halves, or ``qao.ops.swiglu`` with numbers that the module has as attributes: the
    gate is asked with numbers. None for every other gate, and without one.
    """
    if not fused.has_gate:
        return None
    sizes = torch.logspace(-3, 6, 32, device="cpu").unsqueeze(1)  # a limit above a million is not seen
    probe = torch.randn(32, 2 * width, generator=torch.Generator().manual_seed(0), device="cpu") * sizes
    try:
        y = fused._apply_gate(probe)
    except Exception:  # noqa: BLE001  # whatever it needs besides, it is another one
        return None
    for gate in _known(fused):
        expected = plain_swiglu(probe, *gate)
        if y.shape == expected.shape and torch.allclose(y, expected, rtol=1e-5):
            return _silu_mul if gate == (1.0, math.inf, 0.0, False) else functools.partial(_swiglu, gate)
    return None


def _known(fused: Any) -> Iterator[tuple[float, float, float, bool]]:
    """Arguments of ``qao.ops.swiglu`` that it may have, the plainest first."""
    alphas, limits = (_numbers(fused, word) for word in ("alpha", "limit"))
    return itertools.product((1.0, *alphas), (math.inf, *limits), (0.0, 1.0), (False, True))


def _numbers(fused: Any, word: str) -> list[float]:
    numbers = (value for name, value in vars(fused).items() if word in name and type(value) in (int, float))
    return [float(number) for number in numbers if number > 0]


def _silu_mul(rows: Tensor) -> Tensor:
    return ops.silu_mul(*rows.chunk(2, -1))


def _swiglu(gate: tuple[float, float, float, bool], rows: Tensor) -> Tensor:
    return ops.swiglu(rows, *gate)
