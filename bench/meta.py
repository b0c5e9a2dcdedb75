"""Description of a run: device, versions, hash of the sources, command. Imports without torch."""

from __future__ import annotations

import ast
import contextlib
import datetime
import hashlib
import importlib.metadata
import io
import os
import platform
import re
import shlex
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
_SOURCE_FOLDERS = ("csrc", "cuda", "python")
_LIMITS_OF_PEERS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_PEERS = ("humming-kernels", "gemlite", "torchao", "triton", "bitsandbytes", "hqq")
_PEERS += ("gguf", "llama-cpp-python", "llmcompressor")
# Strings and character constants, which may contain comment markers, and comments.
_CPP = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|(//[^\n]*|/\*.*?\*/)', re.DOTALL)
_SOURCE_SUFFIXES = {".cpp", ".cu", ".cuh", ".h", ".inc", ".py"}


def source_hash(root: Path = ROOT) -> str:
    """SHA-256 over path and code of every source file under csrc/, cuda/ and python/, in sorted order.

    Comments, docstrings, blank lines and trailing spaces are excluded: edits to them need no new measurements.
    """
    digest = hashlib.sha256()
    files = (path for folder in _SOURCE_FOLDERS for path in (root / folder).rglob("*"))
    for path in sorted(path for path in files if path.suffix in _SOURCE_SUFFIXES):
        content = code(path).encode()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def code(path: Path) -> str:
    """The text of a source file without comments, docstrings, blank lines and spaces at the end of a line."""
    text = path.read_text()
    if path.suffix == ".py":
        lines = text.splitlines()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
        for string in _docstrings(ast.parse(text)):
            first, last = string.lineno - 1, string.end_lineno or string.lineno
            lines[first:last] = [lines[first][: string.col_offset]] + [""] * (last - first - 1)
    else:
        lines = _CPP.sub(lambda match: match[0] if match[1] is None else " ", text).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _docstrings(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0]


def device_slug(device: str) -> str:
    """Results folder of a device: the short name of a GPU ("NVIDIA H200" is ``h200``), or CPU and kernel level.

    For example ``xeon-amx``; QAO_CPU_ISA lowers the level.
    """
    if device == "cpu":
        return f"{_cpu_family()}-{_cpu_level()}"
    import torch

    name = torch.cuda.get_device_name().lower().replace("nvidia", "").replace("geforce", "")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def describe(device: str) -> dict[str, Any]:
    """The ``meta`` of a results file."""
    import torch

    meta: dict[str, Any]
    if device == "cuda":
        gpu = torch.cuda.get_device_properties()
        meta = {"device": gpu.name, "sms": gpu.multi_processor_count, "l2_bytes": gpu.L2_cache_size}
        meta["cuda"] = torch.version.cuda
    else:
        meta = {"device": _cpu_name(), "kernels": _cpu_level()}
        meta |= {"threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
        held = {name: os.environ[name] for name in ("QAO_CPU_ISA", *_LIMITS_OF_PEERS) if name in os.environ}
        if held:
            meta["held_by"] = held
    return meta | {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "peers": _versions(_PEERS),
        "source_hash": source_hash(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of the installed packages."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def warn_if_busy(meta: dict[str, Any]) -> None:
    if meta.get("load", 0) > 0.5:
        print(f"note: this machine is busy (load average {meta['load']:.1f}); a quiet one gives steadier ratios")


def _cpu_family() -> str:
    """The product line in the CPU's model name, else the architecture."""
    from qao.diagnostics.hardware import cpu_model

    words = re.findall(r"[a-z]+", cpu_model().lower())
    families = ("xeon", "epyc", "ryzen", "threadripper", "core", "neoverse", "graviton")
    return next((family for family in families if family in words), platform.machine())


def _cpu_level() -> str:
    """The level of qao's kernels on this CPU."""
    from qao.ops.library import cpu_features

    return str(cpu_features()["selected"])


def _cpu_name() -> str:
    """Model name and, on Linux, the vector extensions that determine the kernels."""
    from qao.diagnostics.hardware import cpu_model

    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    known = ("avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimddp", "i8mm", "bf16")
    present = [flag for flag in known if flags and flag in flags[1].split()]
    return ", ".join([cpu_model(), *present])
