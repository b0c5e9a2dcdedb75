"""English sentences in every Python installation: first lines of the standard library's docstrings."""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_MODULES = (
    *("argparse", "ast", "asyncio", "calendar", "collections", "concurrent/futures", "configparser", "csv", "ctypes"),
    *("dataclasses", "datetime", "decimal", "difflib", "dis", "email", "enum", "fractions", "ftplib", "functools"),
    *("gettext", "heapq", "html", "http", "imaplib", "importlib", "inspect", "ipaddress", "json", "locale", "logging"),
    *("mailbox", "multiprocessing", "optparse", "os", "pathlib", "pickle", "platform", "poplib", "pstats", "random"),
    *("sched", "selectors", "shutil", "smtplib", "socket", "ssl", "statistics", "string", "subprocess", "tarfile"),
    *("tempfile", "textwrap", "threading", "trace", "typing", "unittest", "urllib", "uuid", "wsgiref", "zipfile"),
)


def standard_library_sentences(count: int) -> list[str]:
    """``count`` distinct sentences of 5 to 30 words, the same on every run with the same Python."""
    library = Path(sysconfig.get_path("stdlib"))
    found: set[str] = set()
    for module in _MODULES:
        folder = library / module
        files = sorted(folder.glob("*.py")) if folder.is_dir() else [library / f"{module}.py"]
        for file in files:
            if file.exists():  # modules come and go between Python versions
                found.update(_sentences(file))
    if len(found) < count:
        raise RuntimeError(f"only {len(found)} docstring sentences in {library}, {count} are needed: is it stripped?")
    return random.Random(0).sample(sorted(found), count)


def _sentences(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            sentence = paragraph.split(". ")[0].rstrip(".")
            if 5 <= len(sentence.split()) <= 30 and not sentence.startswith((">>>", "@")):
                yield f"{sentence}."
