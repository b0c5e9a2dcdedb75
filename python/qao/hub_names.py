"""Names of repositories on the Hugging Face hub, known without an import that takes time."""

from __future__ import annotations

import os
import re

_REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
_ENDINGS = (".gguf", ".safetensors", ".json")  # of files: what ends so names no repository


def is_hub_name(path: str | os.PathLike[str]) -> bool:
    """Whether it may be that of a repository, with or without its owner."""
    name = os.fspath(path)
    return _REPOSITORY.fullmatch(name) is not None and not name.endswith(_ENDINGS)
