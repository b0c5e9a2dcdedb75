"""Loader of the operator library. Importing it registers ``torch.ops.qao.*``."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch


def _load() -> None:
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
    if not ctypes.CDLL(str(library)).qao_is_registered():
        others = {path for path in torch.ops.loaded_libraries if Path(path).parts[-2:] == ("qao", "_C.so")}
        first = ", ".join(sorted(others - {str(library.resolve())})) or "a place that torch does not know"
        raise ImportError(
            f"this process has already loaded another copy of qao, from {first}, so {library} cannot be used. "
            "Start a new process with one of them on sys.path."
        )


_load()
