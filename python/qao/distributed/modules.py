"""Sharded layers: the classes that ``Colwise`` and ``Rowwise`` assign to modules, and their forwards.

A sharded layer holds plain tensors of the rank's part and is a layer of that size: ``out_features``, ``in_features``
and the kernels are those of the part. Its ``state_dict`` holds DTensors of the whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

from ..nn import marker
from ..nn.embedding import QuantEmbedding
from ..nn.linear import QuantLinear
from ..nn.packed_module import PackedModule, Sharded
from ..nn.saved_codes import SavedCodes
from ..schemes import PackedWeight
from .cut import is_cut, joins, part
from .layout import LAST, Layout


def check_row_scales(module: Any, layout: Layout, name: str) -> None:
    """Raises ValueError if the module's part of a weight cannot be quantized alone because of its row scales."""
    if layout.cut.dim == 1 and module.row_scales is not None:
        raise ValueError(
            f"{name}: with {module.scheme.factors.option}, the scales of a row depend on all of its columns, but a "
            "rank has only some. Quantize the whole weight and then shard the layer, or load the whole weight."
        )


class _Sharded(Sharded):
    """Mixin with state dicts of the whole weight. It precedes the nn.Module class in the bases."""

    layout: Layout
    whole_sums: Tensor | None = None  # float32 [N] over all columns; weight_sums are over the rank's columns
    _next_sums: Tensor | None = None  # whole_sums of a weight that is being loaded, if the whole weight was given

    def _whole(self: Any, key: str, tensor: Tensor) -> DTensor:
        layout: Layout = self.layout
        scheme: Any = getattr(self, "scheme", None)  # None: a float layer
        if key == "weight_sums" and self.whole_sums is not None:
            tensor = self.whole_sums
        if key == "qweight" and not joins(scheme, layout.sizes, layout.cut):
            raise ValueError(
                f"{type(self).__name__}.state_dict: {layout}, of a weight {list(layout.sizes)} in {scheme}, end within "
                "a group or a tile of 16 rows and 64 columns, so they do not join to the packed weight. Save the model "
                "before it is sharded, or choose a number of ranks that gives each a multiple of that."
            )
        dim, cut = layout.cut.dim, is_cut(key, scheme, layout.sizes, layout.cut.dim)
        whole = 0
        if cut and scheme is not None and key in ("qweight", "scales"):
            whole = getattr(scheme.empty(*layout.sizes, dtype=self.dtype, device="meta"), key).shape[dim]
        return layout.whole(tensor, cut, dim, whole or layout.cut.size)

    def _save_to_state_dict(self: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        for key, tensor in self._parameters.items():
            if tensor is not None:
                saved = destination[prefix + key]
                destination[prefix + key] = self._whole(key, saved.plain() if isinstance(saved, SavedCodes) else saved)

    def _saved_bias(self: Any) -> Tensor | None:
        bias: Tensor | None = super()._saved_bias()  # type: ignore[misc]
        return None if bias is None else self._whole("bias", bias)

    def _load_from_state_dict(self: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Accepts DTensors as in ``state_dict``, whole tensors, and the rank's parts."""
        for key, own in self._parameters.items():
            value = state_dict.get(prefix + key)
            if own is None or not isinstance(value, Tensor):
                continue
            if not isinstance(value, DTensor) and value.shape == own.shape and key != "weight_sums":
                continue
            wanted = self._whole(key, own)
            if not isinstance(value, DTensor) and value.shape == wanted.shape:
                value = DTensor.from_local(value, self.layout.mesh, [Replicate()], run_check=False)
            if isinstance(value, DTensor) and value.shape == wanted.shape:
                state_dict[prefix + key] = value.redistribute(placements=wanted.placements).to_local()
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[misc]
        if self.whole_sums is not None:
            self.whole_sums = self.weight_sums.detach().clone()
            self.sum_own_columns()

    def _weight_shapes(self: Any) -> list[tuple[int, int]]:
        return [self.layout.sizes, self._sizes]

    def _requantized(self: Any, weight: Tensor, importance: Tensor | None, name: str) -> PackedWeight:
        if tuple(weight.shape) != self.layout.sizes:
            check_row_scales(self, self.layout, name)
        packed: PackedWeight = super()._requantized(weight, importance, name)  # type: ignore[misc]
        self._next_sums = None
        if tuple(weight.shape) == self.layout.sizes:
            self._next_sums = packed.weight_sums
            packed = part(self.scheme, packed, self.layout.sizes, self.layout.cut)
        return packed

    def _overwrite(self: Any, packed: PackedWeight) -> None:
        super()._overwrite(packed)  # type: ignore[misc]
        if self.whole_sums is not None:
            sums = self._next_sums
            if sums is None:
                sums = self.weight_sums.detach().clone()
                dist.all_reduce(sums, group=self.layout.mesh.get_group())
            self.whole_sums.copy_(sums)
        self._next_sums = None

    def sum_own_columns(self: Any) -> None:
        """Sets ``weight_sums`` to the sums over the rank's columns."""
        q, scales, zeros = self.scheme.unpack(self.qweight, self.scales, *self._sizes)
        with torch.no_grad():
            self.weight_sums.copy_(self.scheme._weight_sums(q, scales, zeros))

    def _marker(self: Any) -> marker.Marker:
        n, k = self.layout.sizes  # of the whole weight
        return marker.Marker(self.scheme.to_dict(), n, k, self.dtype)

    def extra_repr(self: Any) -> str:
        return f"{super().extra_repr()}, {self.layout}"  # type: ignore[misc]


class ColwiseQuantLinear(_Sharded, QuantLinear):
    """Linear layer with the rank's rows of W: y [..., N / world] from the whole x."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layout.leave(super().forward(self.layout.enter(x, Replicate())), self.layout.sizes[0])


class RowwiseQuantLinear(_Sharded, QuantLinear):
    """Linear layer with the rank's columns of W: an all-reduce sums the partial y of the ranks' columns of x."""

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.autocast(self.layout.enter(x, LAST)), self.bias
        tensors = self._parameters if bias is None else {**self._parameters, "bias": None}
        return self.layout.add(self._mm(x, tensors, self._constants), bias)


class ColwiseLinear(_Sharded, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.layout.leave(super().forward(self.layout.enter(x, Replicate())), self.layout.sizes[0])


class RowwiseLinear(_Sharded, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.layout.add(functional.linear(self.layout.enter(x, LAST), self.weight), self.bias)


class RowwiseQuantEmbedding(_Sharded, QuantEmbedding):
    """Embedding with the rank's rows of W: zeros for ids of other ranks, then an all-reduce."""

    def forward(self, ids: Tensor) -> Tensor:
        ids, own = self.layout.own_ids(self.layout.enter(ids, Replicate()))
        return self.layout.add(super().forward(ids).masked_fill(~own[..., None], 0), None)


class ColwiseQuantEmbedding(_Sharded, QuantEmbedding):
    """Embedding with the rank's columns of W: rows [..., K / world]."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.layout.leave(super().forward(self.layout.enter(ids, Replicate())), self.layout.sizes[1])


class RowwiseEmbedding(_Sharded, nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        ids, own = self.layout.own_ids(self.layout.enter(ids, Replicate()))
        return self.layout.add(functional.embedding(ids, self.weight).masked_fill(~own[..., None], 0), None)


class ColwiseEmbedding(_Sharded, nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return self.layout.leave(super().forward(self.layout.enter(ids, Replicate())), self.layout.sizes[1])


LINEARS: dict[type[nn.Module], tuple[type[nn.Module], type[nn.Module]]] = {  # split by rows, by columns
    QuantLinear: (ColwiseQuantLinear, RowwiseQuantLinear),
    nn.Linear: (ColwiseLinear, RowwiseLinear),
}
EMBEDDINGS: dict[type[nn.Module], tuple[type[nn.Module], type[nn.Module]]] = {
    QuantEmbedding: (RowwiseQuantEmbedding, ColwiseQuantEmbedding),
    nn.Embedding: (RowwiseEmbedding, ColwiseEmbedding),
}


def give(module: nn.Module, layout: Layout) -> None:
    """Turns a module that already holds its part into a sharded layer, in place."""
    module.layout = layout  # type: ignore[assignment]
    module.__class__ = {**LINEARS, **EMBEDDINGS}[type(module)][layout.cut.dim]


def resize(module: Any, sizes: tuple[int, int]) -> None:
    """Sets the size attributes of a module to those of a weight of these sizes."""
    n, k = sizes
    if isinstance(module, (nn.Linear, QuantLinear)):
        module.out_features, module.in_features = n, k
    else:
        module.num_embeddings, module.embedding_dim = n, k
    if isinstance(module, PackedModule):
        module._sizes, module._constants = sizes, module.scheme.constants(n, k)
        module._freeze()
