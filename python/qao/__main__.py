"""``python -m qao``: what this installation is and what it can use. ``python -m qao doctor``: does it work here?

Put the output of ``doctor`` into every bug report.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import sys
from pathlib import Path

import torch

from . import doctor
from ._version import __version__


def _build() -> list[tuple[str, str]]:
    try:
        from . import _host
    except ImportError as error:
        return [("build", f"unknown: qao._host is not available ({error}); the operators work without it")]
    build, cpu = _host.build_info(), _host.cpu_features()
    cuda = f"CUDA {build['cuda']} ({', '.join(build['archs'])})" if build["cuda"] else "no CUDA kernels"
    return [
        ("build", f"{cuda}, {build['compiler']}, torch {build['torch']}"),
        ("ABI", f"LibTorch stable ABI of torch {build['torch_target']}, loaded by torch {torch.__version__}"),
        ("CPU kernels", cpu["error"] or f"{cpu['selected']} (this CPU offers {cpu['detected']})"),
    ]


def _gpus() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        return [("GPU", "none that torch can use")]
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    driver = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver))
    return [
        ("driver", f"for CUDA {driver.value // 1000}.{driver.value % 1000 // 10}"),
        *((f"GPU {i}", f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}") for i, gpu in enumerate(gpus)),
    ]


def _facts() -> None:
    rows = [
        ("qao", f"{__version__}, {Path(__file__).parent}"),
        ("Python", f"{platform.python_version()}, {sys.executable}"),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} CPU threads, CUDA {torch.version.cuda}"),
        *_gpus(),
        *_build(),
    ]
    for name, text in rows:
        print(f"{name:<12} {text}")


def _doctor() -> int:
    print()
    failed = total = 0
    for check in doctor.checks():
        total += 1
        failed += check.problem is not None
        print(f"{'ok' if check.problem is None else 'FAIL':<5} {check.name}", *filter(None, [check.problem]), sep="  ")
    print(f"\n{total - failed} of {total} checks passed")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="qao", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["doctor"], help="run every operator against its reference")
    command = parser.parse_args().command
    _facts()
    return _doctor() if command == "doctor" else 0


if __name__ == "__main__":
    sys.exit(main())
