"""Third-party checkpoints (``open_checkpoint(path)``), and the files of qao.save and qao.load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import Checkpoint, CheckpointError, LazyTensor, Plain, QuantizedLayer

if TYPE_CHECKING:
    from .gguf.tokenizer import load_tokenizer
    from .opening import open_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "LazyTensor",
    "Plain",
    "QuantizedLayer",
    "load_tokenizer",
    "open_checkpoint",
]


def __getattr__(name: str) -> Any:
    """Functions, once they are used: ``open_checkpoint`` imports safetensors, and ``import qao`` does not."""
    if name == "open_checkpoint":
        from .opening import open_checkpoint

        return open_checkpoint
    if name == "load_tokenizer":
        from .gguf.tokenizer import load_tokenizer

        return load_tokenizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
