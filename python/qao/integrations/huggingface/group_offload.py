"""diffusers' group offloading to disk: aligns what it reads from a file, as kernels need."""

from __future__ import annotations

from typing import Any

from diffusers.hooks.group_offloading import ModuleGroup

from ...nn.packed_module import aligned
from ..wrapping import wrap


def register() -> None:
    """Called after diffusers has defined its groups."""
    wrap(ModuleGroup, "_onload_from_disk", _aligning)


def _aligning(upstream: Any) -> Any:
    def onload_from_disk(self: Any, *args: Any, **options: Any) -> None:
        upstream(self, *args, **options)
        for tensor in self.tensor_to_key:  # its ``data`` is a view of the file's bytes now
            tensor.data = aligned(tensor.data)

    return onload_from_disk
