"""Finding: what a fuzzer raises. Imports nothing, so that a worker starts fast."""

from __future__ import annotations


class Finding(AssertionError):
    """A wrong result. The message says what was called."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise Finding(message)
