"""``python -m qao``: what this installation is and what it can use. Its output belongs in every bug report."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

from ._version import __version__


def _build() -> list[tuple[str, str]]:
    try:
        from . import _host
    except ImportError as error:
        return [("build", f"unknown: qao._host is not available ({error}); the operators work without it")]
    build, cpu = _host.build_info(), _host.cpu_features()
    cuda = f"CUDA {build['cuda']} ({', '.join(build['archs'])})" if build["cuda"] else "no CUDA kernels"
    return [
        ("build", f"{cuda}, {build['compiler']}, torch {build['torch']} (target {build['torch_target']})"),
        ("CPU kernels", cpu["error"] or f"{cpu['selected']} (this CPU offers {cpu['detected']})"),
    ]


def _gpus() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        return [("GPU", "none that torch can use")]
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(f"GPU {i}", f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}") for i, gpu in enumerate(gpus)]


def main() -> None:
    rows = [
        ("qao", f"{__version__}, {Path(__file__).parent}"),
        ("Python", f"{platform.python_version()}, {sys.executable}"),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} CPU threads, CUDA {torch.version.cuda}"),
        *_gpus(),
        *_build(),
    ]
    for name, text in rows:
        print(f"{name:<12} {text}")


if __name__ == "__main__":
    main()
