"""An output directory that is created completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from .common import Failure


@contextlib.contextmanager
def staged(out: Path, source: Path, force: bool) -> Iterator[Path]:
    """A temporary directory next to ``out``. It becomes ``out`` at the end and is removed after an error.

    Raises:
        Failure: ``out`` exists and ``force`` is not given, is no model that may be replaced, or holds ``source``.
    """
    out = Path(os.path.abspath(out))
    check_out(out, source, force)
    staging = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    made = [parent for parent in staging.parents if not parent.exists()]  # to be removed again, innermost first
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise Failure(f"{out}: cannot be written: {error.strerror} ({staging})") from error
    try:
        yield staging
        if out.exists():
            replaced = out.with_name(f"{out.name}.old-{os.getpid()}")
            out.rename(replaced)
            staging.rename(out)
            shutil.rmtree(replaced)
        else:
            staging.rename(out)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        _name_a_full_disk(out, error)
        raise


@contextlib.contextmanager
def staged_file(out: Path, source: Path, force: bool) -> Iterator[Path]:
    """As ``staged``, for a single file in an existing directory."""
    out = Path(os.path.abspath(out))
    check_out(out, source, force)
    if not out.parent.is_dir():
        raise Failure(f"{out.parent}: no such directory")
    staging = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        yield staging
        staging.replace(out)
    except BaseException as error:
        staging.unlink(missing_ok=True)
        _name_a_full_disk(out, error)
        raise


def _name_a_full_disk(out: Path, error: BaseException) -> None:
    """Raise Failure if that is the error."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError) and error.errno in full:
        raise Failure(f"{out}: {error.strerror}; partial output was removed") from error
    for code in full:  # safetensors raises an exception without an errno
        if isinstance(error, Exception) and f"(os error {code})" in str(error):
            raise Failure(f"{out}: {os.strerror(code)}; partial output was removed") from error


def check_out(out: Path, source: Path, force: bool) -> None:
    """Raise Failure if ``out`` cannot be written, see ``staged``."""
    if not out.exists() and not out.is_symlink():
        return
    if not force:
        raise Failure(f"{out} exists; choose another name, or replace it with --force")
    if out.suffix == ".gguf" and out.is_file() and not out.is_symlink():
        if source.exists() and out.samefile(source):
            raise Failure(f"{out} is the input; choose another name")
        return
    if not out.is_dir() or out.is_symlink():
        raise Failure(f"{out} is not a directory; --force only replaces directories that hold a model")
    if source.resolve().is_relative_to(out.resolve()):
        raise Failure(f"{out} is the input ({source}); choose another name")
    # A mistyped path must not delete a home directory.
    if any(out.iterdir()) and not (list(out.glob("*.safetensors")) or (out / "config.json").exists()):
        raise Failure(f"{out} holds no model; --force only replaces directories that do")
