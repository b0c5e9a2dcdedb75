"""Detection of the gate between the projections of fused experts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from ..ops.grouped_autograd import Gate
from ..ops.norm_act import plain_swiglu


def gate_of(fused: Any, width: int) -> Gate | None:
    """``gate`` of the up projection's grouped GEMM that equals the model's gate from [S, 2 * width] to [S, width].

    It probes the model's gate with random input and compares with SiLU and with the module's numeric attributes as
    parameters. None for other gates, and without a gate.
    """
    if not fused.has_gate:
        return None
    options: Any = {"dtype": torch.float32, "device": "cpu"}  # loaders set other defaults
    sizes = torch.logspace(-3, 6, 32, **options).unsqueeze(1)  # a limit above a million is not detected
    probe = torch.randn(32, 2 * width, generator=torch.Generator().manual_seed(0), **options) * sizes
    try:
        y = fused._apply_gate(probe)
    except Exception:  # noqa: BLE001  # it needs other inputs, so it is another gate
        return None
    for gate in _known(fused):
        expected = plain_swiglu(probe, *gate)
        if y.shape == expected.shape and torch.allclose(y, expected, rtol=1e-5):
            return gate
    return None


def _known(fused: Any) -> Iterator[tuple[float, float, float, bool]]:
    """Candidate arguments of ``qao.ops.swiglu``, the simplest first."""
    alphas, limits = (_numbers(fused, word) for word in ("alpha", "limit"))
    return itertools.product((1.0, *alphas), (math.inf, *limits), (0.0, 1.0), (False, True))


def _numbers(fused: Any, word: str) -> list[float]:
    numbers = (value for name, value in vars(fused).items() if word in name and type(value) in (int, float))
    return [float(number) for number in numbers if number > 0]
