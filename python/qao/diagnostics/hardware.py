"""Facts about the CPU, the GPUs and the driver. None of them identifies this machine."""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path
from typing import NamedTuple


class Gpu(NamedTuple):
    name: str
    capability: str
    sms: int
    gib: int


class Driver(NamedTuple):
    """``version`` is None where the kernel does not say it, as in WSL."""

    version: str | None
    cuda: str  # the newest version that it runs


def cpu_model() -> str:
    """The model name that Linux knows, else the architecture."""
    return _found(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo") or platform.machine()


def gpus() -> list[Gpu]:
    import torch

    every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        Gpu(one.name, f"{one.major}.{one.minor}", one.multi_processor_count, round(one.total_memory / 2**30))
        for one in every
    ]


def driver() -> Driver | None:
    """The driver of the GPUs; None without one that torch supports."""
    import torch

    if not torch.cuda.is_available():
        return None
    number = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    version = _found(r"Kernel Module .*?\b(\d+\.\d+(?:\.\d+)?)\b", "/proc/driver/nvidia/version")
    return Driver(version, f"{number.value // 1000}.{number.value % 1000 // 10}")


def _found(pattern: str, name: str) -> str | None:
    file = Path(name)
    match = re.search(pattern, file.read_text(), re.MULTILINE) if file.exists() else None
    return match[1].strip() if match else None
