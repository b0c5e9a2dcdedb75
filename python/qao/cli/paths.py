"""Checks of command-line paths by name, without slow imports or reads."""

from __future__ import annotations

import argparse
from pathlib import Path

from .._words import is_hub_name
from .common import Failure
from .staging import check_out


def check_paths(args: argparse.Namespace) -> None:
    """Raise Failure if an input path does not exist, or an output path cannot be written."""
    for name in ("model", "against"):
        path = getattr(args, name, None)
        if path is not None and not Path(path).exists() and not is_hub_name(path):
            raise Failure(f"{path}: no such file or directory")
    for name in ("text", "calibrate"):
        path = getattr(args, name, None)
        if path is not None and not path.is_file():
            raise Failure(f"{path}: {'is a directory, not a text file' if path.is_dir() else 'no such file'}")
    if (out := getattr(args, "out", None)) is not None:
        check_out(out, args.model, args.force)
    if (share := getattr(args, "share", None)) not in (None, "-"):
        _check_new_file(Path(share))


def _check_new_file(file: Path) -> None:
    if file.exists() or file.is_symlink():
        raise Failure(f"{file}: exists; name a new file")
    if not file.parent.is_dir():
        raise Failure(f"{file}: {file.parent} is not a directory")
