"""Layouts of a sharded layer's tensors among ranks, and redistribution between them.

At inference, with plain tensors in the default layouts, a layer runs at most one collective on a plain tensor. All
other cases use DTensor, in particular gradients, because its redistributions have correct backward passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .cut import Cut

LAST = Shard(-1)


@dataclass(frozen=True)
class Layout:
    """Layout of one sharded layer, the same on every rank except for ``cut``."""

    mesh: DeviceMesh
    cut: Cut
    sizes: tuple[int, int]  # of the whole weight [N, K]
    inputs: Placement  # of plain input tensors
    outputs: Placement
    use_local_output: bool

    def enter(self, x: Tensor, wanted: Placement) -> Tensor:
        """The rank's local x, redistributed to ``wanted``."""
        if not isinstance(x, DTensor):
            differs = torch.is_grad_enabled() and x.requires_grad and wanted == Replicate()
            if self.inputs == wanted and not differs:
                return x
            x = DTensor.from_local(x, self.mesh, [self.inputs], run_check=False)
        if x.placements != (wanted,):
            x = x.redistribute(placements=[wanted])
        # Each rank's rows of W give a partial gradient of a replicated x.
        return x.to_local(grad_placements=[Partial()] if wanted == Replicate() else None)

    def leave(self, y: Tensor, size: int) -> Tensor:
        """The output, from the rank's part of y [..., size], which is sharded in its last dimension."""
        if self.outputs == LAST and self.use_local_output:
            return y
        shape = torch.Size((*y.shape[:-1], size))
        stride = torch.empty(shape, device="meta").stride()
        return self._out(DTensor.from_local(y, self.mesh, [LAST], run_check=False, shape=shape, stride=stride), None)

    def add(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """The sum of y over all ranks plus the bias once. It may overwrite y."""
        plain = self.outputs == Replicate() and self.use_local_output
        if plain and not (torch.is_grad_enabled() and (y.requires_grad or (bias is not None and bias.requires_grad))):
            if torch.compiler.is_compiling():
                y = wait_tensor(all_reduce(y, "sum", (self.mesh, 0)))
            else:
                dist.all_reduce(y, group=self.mesh.get_group())
            return y if bias is None else y + bias.to(y.dtype)
        return self._out(DTensor.from_local(y, self.mesh, [Partial()], run_check=False), bias)

    def _out(self, y: Any, bias: Tensor | None) -> Tensor:
        if y.placements != (self.outputs,):
            y = y.redistribute(placements=[self.outputs])
        if bias is not None:
            y = y + DTensor.from_local(bias.to(y.dtype), self.mesh, [Replicate()], run_check=False)
        return y.to_local() if self.use_local_output else y  # type: ignore[no-any-return]

    def own_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Local row ids, 0 for rows of other ranks, and a mask of the rank's rows.

        Ids outside the whole weight stay unchanged, so that all ranks raise for them.
        """
        begin, end, n = self.cut.begin, self.cut.end, self.cut.size
        own = (ids >= begin) & (ids < end)
        wrong = (ids < 0) | (ids >= n)
        return torch.where(own, ids - begin, torch.where(wrong, ids, 0)), own

    def whole(self, tensor: Tensor, cut: bool, dim: int, size: int) -> DTensor:
        """The whole tensor as a DTensor: sharded along ``dim`` with total size ``size`` if ``cut``, else replicated."""
        if not cut:
            return DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)
        shape = torch.Size((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(tensor, self.mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)

    def __str__(self) -> str:
        cut, name = self.cut, ("rows", "columns")[self.cut.dim]
        return f"{name} {cut.begin}:{cut.end} of {cut.size}, rank {cut.rank} of {cut.world}"

    def __deepcopy__(self, memo: dict[int, object]) -> Layout:
        return self  # process groups cannot be copied
