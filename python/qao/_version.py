"""The version of qao, and the commit that this copy was built from."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

__version__ = "0.2.0"  # the only place; pyproject.toml and CMakeLists.txt read it from here


@cache
def commit() -> str | None:
    """Twelve hexadecimal digits, with "-dirty" where files were changed; None where nothing says.

    Builds and source distributions hold it in a file; a checkout asks git.
    """
    file = Path(__file__).with_name("_commit.txt")
    return file.read_text().strip() if file.exists() else of_checkout(Path(__file__).resolve().parents[2])


def of_checkout(root: Path) -> str | None:
    """That of the checkout whose root this is; None if it is none, or there is no git."""
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):  # no git, or one that does not trust the folder
        return None
