"""The hardware report of ``qao doctor --share``. bench/reports.py in the repository has its schema.

Only the keys below leave this machine. Texts keep the characters of product names and versions. The message of a failed
check, which may hold a path, is left out.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._version import __version__, commit

if TYPE_CHECKING:
    from ..diagnostics.doctor import Check

SCHEMA, VERSION = "qao hardware report", 1
_CONTENTS = (
    "The report holds the versions, the CPU, the GPUs and the driver, the names of failed checks and the times above.\n"
    "It holds no host or user name, path, serial number or environment variable."
)


def report(checks: Sequence[Check], speeds: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of a report. ``speeds``: as in ``qao doctor --json``."""
    import torch

    from ..diagnostics import hardware
    from ..ops.library import build_info, cpu_features

    failed = [_plain(check.name) for check in checks if check.problem is not None]
    cpu, build = cpu_features(), build_info()
    driver = hardware.driver()
    of_build = re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", commit() or "")
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "qao": __version__,
        "commit": of_build and of_build[0],
        "python": _version(platform.python_version()),
        "torch": _version(torch.__version__),
        "os": platform.system(),
        "machine": platform.machine(),
        "cpu": {
            "model": _plain(hardware.cpu_model()),
            "features": (cpu["features"] or "").split(),
            "kernels": cpu["selected"],
            "threads": torch.get_num_threads(),
        },
        "cuda": {
            "torch": torch.version.cuda,
            "qao": build["cuda"],
            "driver": driver and driver.version,
            "driver_cuda": driver and driver.cuda,
        },
        "gpus": [gpu._asdict() | {"name": _plain(gpu.name)} for gpu in hardware.gpus()],
        "checks": {"passed": len(checks) - len(failed), "failed": failed},
        "speeds": [_rounded(speed) for speed in speeds],
    }


def text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def explanation(file: str) -> str:
    """For people: what the report holds, and where it belongs."""
    where = f"Attach {file}" if file != "-" else "Attach it"
    return f'{_CONTENTS}\n{where} to an issue "Hardware report" of qao{_issues()}.'


def _issues() -> str:
    """The address of the issues, if this build knows it."""
    try:
        links = importlib.metadata.metadata("qao").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:  # run from the sources
        links = []
    return next((f": {link.partition(', ')[2]}" for link in links if link.startswith("Issues, ")), "")


def _rounded(speed: dict[str, Any]) -> dict[str, Any]:
    ratios = {word: float(f"{ratio:.3g}") for word, ratio in speed["ratios"].items()}
    sizes = {key: speed[key] for key in ("device", "m", "n", "k")}
    return sizes | {"bf16_us": float(f"{speed['bf16_us']:.3g}"), "ratios": ratios}


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9 ()@.,+/_:-]+", " ", name)[:80].strip(" @.,+/_:-") or "unknown"


def _version(full: str) -> str:
    """Without the label of a private build, which may name its builder."""
    found = re.match(r"[0-9.]+(?:(?:a|b|rc|\.dev)\d+)?(?:\+(?:cpu|cu\d+)$)?", full)
    return found[0] if found else "0"
