"""Local files of a checkpoint: a path, or a repository on the Hugging Face hub, downloaded or cached."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from .._words import is_hub_name
from .base import CheckpointError

__all__ = ["local_copy"]

_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")  # no pickles, no code
# Pickles and other formats of the same weights in a repository.
_AGAIN = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.onnx*", "onnx/*", "*.gguf"]
_AGAIN += ["original/*", "openvino/*", "coreml/*", "metal/*"]
_HUB = ("revision", "cache_dir", "force_download", "local_files_only", "token")


def local_copy(
    path: str | os.PathLike[str],
    *,
    subfolder: str = "",
    gguf_file: str | None = None,
    code: bool = False,
    pickles: bool = False,
    everything: bool = False,
    **hub: Any,
) -> Path:
    """The local directory or file of this name. Downloads a repository of the Hugging Face hub first.

    Args:
        path: a path, with ``~`` for the home directory, or a repository name, with or without its owner. An existing
            path takes precedence.
        subfolder: the only folder of a repository to download.
        gguf_file: the only weights of a repository to download.
        code: download the Python files of a repository too.
        pickles: download the ``*.bin`` files of a repository too.
        everything: download all files of a repository except duplicate weight formats; overrides the above.
        hub: revision, cache_dir, force_download, local_files_only and token, as in transformers' ``from_pretrained``.

    Raises:
        CheckpointError: neither the path nor the repository exists, or the download fails.
        ImportError: huggingface_hub is not installed.
    """
    local, name = Path(path).expanduser(), os.fspath(path)
    if local.exists():
        return local
    if not is_hub_name(name):
        raise CheckpointError(f"{path}: no such file or directory")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(f"{path}: no such directory; to download it, pip install huggingface_hub") from error
    patterns = [*_FILES, *(["*.py"] if code else ()), *(["*.bin"] if pickles else ())]
    if gguf_file is not None:
        patterns = [pattern for pattern in patterns if pattern != "*.safetensors"]
        patterns.append(re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-*-of-\1.gguf", gguf_file))
    if subfolder:
        patterns = [f"{subfolder.strip('/')}/{pattern}" for pattern in patterns] + (["*.py"] if code else [])
    options = {key: hub[key] for key in _HUB if hub.get(key) is not None}
    options |= {"ignore_patterns": _AGAIN} if everything else {"allow_patterns": patterns}
    try:
        return Path(snapshot_download(name, **options))
    except (OSError, ValueError) as error:  # base classes of all hub errors
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{path}: no such file or directory, and no such repository on the Hugging Face hub is accessible "
            f"from here: {reason}"
        ) from error
