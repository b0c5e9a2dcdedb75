"""Turns of several processes on one GPU."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


class Turns:
    """Preparations, many at once, or a measurement, alone, among all runs that use the same file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def start(self) -> AbstractContextManager[None]:
        return self._lock(fcntl.LOCK_SH)

    def measure(self) -> AbstractContextManager[None]:
        return self._lock(fcntl.LOCK_EX)

    @contextmanager
    def _lock(self, kind: int) -> Iterator[None]:
        with self._file.open("a") as file:
            fcntl.flock(file, kind)
            yield
