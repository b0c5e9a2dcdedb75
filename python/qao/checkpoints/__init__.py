"""Checkpoints that others quantised, opened for qao's kernels: ``open_checkpoint(path)``."""

from __future__ import annotations

from .base import Checkpoint, CheckpointError, LazyTensor, Plain, QuantizedLayer

__all__ = ["Checkpoint", "CheckpointError", "LazyTensor", "Plain", "QuantizedLayer"]
