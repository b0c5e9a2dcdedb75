"""Markdown helpers shared by all results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .result_files import runs_of


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table with the first column left-aligned, the others right-aligned."""
    rule = [":---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, rule, *lines])


def caption(meta: dict[str, Any], rows: Sequence[dict[str, Any]] = ()) -> str:
    """Where and when results were measured. ``rows``: dated ones, if they are of several runs."""
    threads = f", {meta['threads']} threads" if "threads" in meta else ""
    held = ", ".join(f"{name}={value}" for name, value in meta.get("held_by", {}).items())
    threads += f", held to fewer instructions ({held})" if held else ""
    when = runs_of(rows) if rows else f"{meta['date']}, sources {meta['source_hash'][:12]}"
    return f"{meta['device']}{threads}, torch {meta['torch']}, {when}"
