"""The version of qao and the commit of this build."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

__version__ = "0.2.0"  # the only definition; pyproject.toml and CMakeLists.txt read it from here


@cache
def commit() -> str | None:
    """Twelve hexadecimal digits, with "-dirty" if files were changed; None if unknown.

    Builds and source distributions store it in a file; in a checkout it comes from git.
    """
    file = Path(__file__).with_name("_commit.txt")
    return file.read_text().strip() if file.exists() else of_checkout(Path(__file__).resolve().parents[2])


def of_checkout(root: Path) -> str | None:
    """The commit of the checkout with this root; None if it is not a checkout, or without git."""
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):  # no git, or the folder is not trusted
        return None
