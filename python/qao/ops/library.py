"""Loader of the operator library, and facts of its build. Importing it registers ``torch.ops.qao.*``."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch


def _load() -> ctypes.CDLL:
    library = Path(__file__).parents[1] / "_C.so"
    if sys.platform != "linux":
        raise ImportError(
            f"qao only runs on Linux; this is {sys.platform}. On Windows use WSL 2, on macOS a Linux container."
        )
    if not library.exists():
        raise ImportError(
            f"qao's operator library is missing ({library}). In a source checkout, build it with "
            "`pip install --no-build-isolation -e .`; otherwise reinstall qao."
        )
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise ImportError(
            f"qao's operator library cannot be loaded with torch {torch.__version__}: {error}. qao needs torch >= "
            "2.11; upgrade torch or reinstall qao."
        ) from error
    symbols = ctypes.CDLL(str(library))
    if not symbols.qao_is_registered():
        others = {path for path in torch.ops.loaded_libraries if Path(path).parts[-2:] == ("qao", "_C.so")}
        first = ", ".join(sorted(others - {str(library.resolve())})) or "a place that torch does not know"
        raise ImportError(
            f"this process has already loaded another copy of qao, from {first}, so {library} cannot be used. "
            "Start a new process with one of them on sys.path."
        )
    return symbols


_symbols = _load()


@cache
def build_info() -> dict[str, Any]:
    """How the library was built.

    Returns:
        "version" of qao; "cuda", that of the toolkit (None without CUDA kernels); "archs" of GPUs; "compiler"; "torch";
        "torch_target", the oldest torch that loads the library.
    """
    facts = _facts("qao_build_info")
    return {**facts, "archs": (facts["archs"] or "").split()}


@cache
def cpu_features() -> dict[str, str | None]:
    """The CPU and the kernels for it.

    Returns:
        "selected", the instruction set of the kernels; "detected", the highest that this CPU has; its "features";
        "error": why none could be selected (QAO_CPU_ISA).
    """
    return _facts("qao_cpu_features")


def _facts(function: str) -> dict[str, str | None]:
    call = getattr(_symbols, function)
    call.restype = ctypes.c_char_p
    lines = (line.partition("\t") for line in call().decode().splitlines())
    return {name: value or None for name, _, value in lines}
