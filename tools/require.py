"""Python packages and programs that a `make` target lacks: ``require.py torch>=2.11 pytest cmake``.

Used where make installs nothing (VENV=). Exit status 1 if something is missing.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

PROGRAMS = ("cmake", "ninja")


def version(text: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" is (2, 13, 0)."""
    return tuple(int(part) for part in text.split("+")[0].split(".") if part.isdigit())


def problem(requirement: str) -> str | None:
    """Why this environment lacks `requirement` ("name" or "name>=version"), or None."""
    name, _, lowest = requirement.partition(">=")
    if name in PROGRAMS and (shutil.which(name) or Path(sys.executable).with_name(name).exists()):
        return None
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement} is not installed"
    if lowest and version(found) < version(lowest):
        return f"{requirement} is needed, {found} is installed"
    return None


def main(requirements: list[str]) -> int:
    if sys.version_info < (3, 10, 6):
        print(f"qao needs Python 3.10.6 or newer; this is {sys.version.split()[0]} ({sys.executable}).")
        return 1
    problems = [text for text in map(problem, requirements) if text]
    if problems:
        print(f"{sys.executable} cannot run this target:", *problems, sep="\n  ")
        print("Install these there, or leave VENV at its default: make then creates .venv and installs them.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
