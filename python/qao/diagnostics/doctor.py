"""Installation check, ``python -m qao doctor``: every operator on every device against its reference."""

from __future__ import annotations

import importlib
import importlib.machinery
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from .._version import __version__
from ..nn import cuda_build
from ..ops.library import build_info, cpu_features
from ..schemes.base import _host
from .operator_checks import OF_CPU, OPERATORS

# ‖y - reference‖ / ‖reference‖. Rounding y to bfloat16 costs 2^-9, activations rounded the other way at a tie less than
# 2^-7. The error of a wrong kernel is far above 2^-6.
_MAX_ERROR = 2.0**-6


class Check(NamedTuple):
    name: str
    problem: str | None  # None: passed


def checks() -> Iterator[Check]:
    """Run the checks one at a time."""
    yield from _build()
    for device in ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))):
        for name, error in OPERATORS.items():
            if device != "cpu" and name in OF_CPU:
                continue
            yield Check(f"{device} {name}", _problem_of(error, device))


def host_problem() -> str | None:
    """Why the optional qao._host is not available; None if it is, or was left out of this build."""
    built = sorted(Path(__file__).parents[1].glob("_host.*.so"))
    if _host is not None or not built:
        return None
    try:
        importlib.import_module("qao._host")
    except ImportError as error:
        suffixes = importlib.machinery.EXTENSION_SUFFIXES
        others = not any(path.name == f"_host{suffix}" for path in built for suffix in suffixes)
        why = f"it is for a different version of Python; this one needs _host{suffixes[0]}" if others else str(error)
        return f"{built[0]} cannot be loaded: {why}. The operators do not need it; reinstall qao"
    return None


def _build() -> Iterator[Check]:
    if (problem := host_problem()) is not None:
        yield Check("qao._host", problem)
    build, cpu = build_info(), cpu_features()
    mixed = f"libraries of qao {build['version']} with Python sources of {__version__}: reinstall qao"
    yield Check("one version", None if build["version"] == __version__ else mixed)
    yield Check("instruction set", cpu["error"])
    if torch.cuda.is_available():
        yield Check("CUDA kernels", cuda_build.problem())


def _problem_of(error: Callable[[str], float], device: str) -> str | None:
    try:
        value = error(device)
    except Exception as exception:  # any exception is a result of the check
        return f"{type(exception).__name__}: {exception}"
    return None if value <= _MAX_ERROR else f"differs from the reference by {value:.3g} of its size"
