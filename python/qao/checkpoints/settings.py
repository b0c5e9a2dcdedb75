"""Type- and range-checked access to an untrusted config.json."""

from __future__ import annotations

from typing import Any

from .base import CheckpointError

__all__ = ["Settings", "matches"]

_SECONDS = 1.0  # that a regular expression may take on one name


class Settings:
    """A JSON object with checked access; ``where`` is the prefix of CheckpointError messages."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise CheckpointError(f"{where} must be an object, not {values!r:.80}")
        self.values = values
        self.where = where

    def fail(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name} must be {expected}, not {self.values.get(name)!r:.80}")

    def integer(self, name: str, default: int | None = None, *, low: int = -1, high: int = 1 << 24) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or not low <= value <= high:
            raise self.fail(name, f"an integer from {low} to {high}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.fail(name, "a string")
        return value.lower()

    def texts(self, name: str) -> list[str]:
        value = self.values.get(name) or []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.fail(name, "a list of strings")
        return value

    def child(self, name: str) -> Settings | None:
        """The object under that name; None if it is absent, null or empty."""
        value = self.values.get(name)
        return Settings(value, f"{self.where}: {name}") if value else None

    def children(self, name: str) -> dict[str, Settings]:
        child = self.child(name)
        return {} if child is None else {key: Settings(value, f"{child.where}: {key}") for key, value in child}

    def __iter__(self) -> Any:
        return iter(self.values.items())


def matches(pattern: str, name: str, where: str, *, whole: bool = False) -> bool:
    """Whether a regular expression of a config matches the start of a module's name, or the whole name."""
    import regex  # unlike re, it can stop an expression such as (a+)+x, which takes 2^n steps for n letters

    try:
        compiled = regex.compile(pattern)
        return (compiled.fullmatch if whole else compiled.match)(name, timeout=_SECONDS) is not None
    except TimeoutError as error:
        raise CheckpointError(f"{where}: {pattern!r:.80} takes too long on the name {name!r:.80}") from error
    except (regex.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{where}: {pattern!r:.80} is not a regular expression: {error}") from error
