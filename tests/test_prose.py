"""Words that docs, comments, docstrings and messages avoid; docs/glossary.md has the words to use.

``LEFT`` counts the uses that are left. It only shrinks: lower a number when you rewrite a sentence.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".md", ".py", ".h", ".cuh", ".cu", ".cpp", ".inc", ".toml", ".yml"}
ELSEWHERE = ("bench/results/", "third_party/", "tests/test_prose.py", "CHANGELOG.md")
LEFT = {
    r"\bbeside\b": 0,
    r"\bcopy engine": 0,
    r"\bwhose\b": 1,
    r"\bby turns\b": 0,
    r"\bof its own\b": 0,
    r"\bwhat is\b": 4,
    r"\bnobody\b": 0,
    r"\bobstacle\b": 0,
    r"\bare none\b": 0,
    r"\bthe same of\b": 0,
    r"\bspared\b": 0,
    r"\btold\b": 0,
    r"quantis": 4,
}


def prose() -> str:
    """Every tracked file of text in one string."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    names = [name for name in listed.stdout.splitlines() if not name.startswith(ELSEWHERE)]
    paths = [ROOT / name for name in names if Path(name).suffix in SUFFIXES]
    assert len(paths) > 300
    return "\n".join(path.read_text() for path in paths if path.exists())


def test_words_of_the_old_dialect_only_get_fewer() -> None:
    text = prose()
    found = {word: len(re.findall(word, text, re.IGNORECASE)) for word in LEFT}
    more = {word: f"{found[word]}, at most {LEFT[word]}" for word in LEFT if found[word] > LEFT[word]}
    assert not more, f"docs/glossary.md has the words to use instead: {more}"
    fewer = {word: found[word] for word in LEFT if found[word] < LEFT[word]}
    assert not fewer, f"lower the numbers in LEFT: {fewer}"
