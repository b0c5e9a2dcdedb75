"""Checkpoints that others quantised, opened for qao's kernels: ``open_checkpoint(path)``."""

from __future__ import annotations

from .base import Checkpoint, CheckpointError, LazyTensor, Plain, QuantizedLayer
from .opening import open_checkpoint

__all__ = ["Checkpoint", "CheckpointError", "LazyTensor", "Plain", "QuantizedLayer", "open_checkpoint"]
