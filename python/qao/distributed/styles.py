"""Colwise and Rowwise: ParallelStyles that shard QuantLinear, QuantEmbedding and their float modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..nn.eligibility import Unsupported, unsupported_reason
from ..nn.embedding import QuantEmbedding
from ..nn.linear import QuantLinear
from ..nn.packed_module import PackedModule, Sharded, frozen
from ..schemes import PackedWeight
from .cut import Cut, cut, is_cut, joins, local, part, units
from .layout import LAST, Layout
from .modules import EMBEDDINGS, LINEARS, check_row_scales, give, resize

_WHOLE = Replicate()


class _Style(ParallelStyle):
    """Base of both styles; a subclass defines the dimension of W [N, K] along which a linear layer is split."""

    linear_dim: int
    _layouts: dict[int, tuple[Placement, Placement]] = {0: (_WHOLE, LAST), 1: (LAST, _WHOLE)}

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts, self.output_layouts = input_layouts, output_layouts
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _take_part(module, self._layout_of(module, device_mesh), _Sender(device_mesh, self.src_data_rank))
        return module

    def expect(self, module: PackedModule, mesh: DeviceMesh) -> None:
        """Turns the Parameters of a module on meta into DTensors, so that a loader reads only the rank's parts.

        ``_apply`` then takes them. If parts do not join to the whole, Parameters are unchanged.
        """
        layout = self._layout_of(module, mesh)
        if not joins(module.scheme, layout.sizes, layout.cut):
            return
        for key, tensor in module._parameters.items():
            if tensor is not None and is_cut(key, module.scheme, layout.sizes, layout.cut.dim):
                placed = distribute_tensor(tensor, mesh, [Shard(layout.cut.dim)], src_data_rank=None)
                module._parameters[key] = nn.Parameter(placed, requires_grad=False)

    def _layout_of(self, module: nn.Module, device_mesh: DeviceMesh) -> Layout:
        dim = self.linear_dim if type(module) in LINEARS else 1 - self.linear_dim
        _check(module, type(self).__name__, device_mesh)
        weight: Any = module._parameters["qweight" if isinstance(module, PackedModule) else "weight"]
        sizes: tuple[int, int] = module._sizes if isinstance(module, PackedModule) else tuple(weight.shape)
        parts = units(module.scheme, sizes) if isinstance(module, PackedModule) else (1, 1)
        rank, world = device_mesh.get_local_rank(), device_mesh.size()
        own = cut(sizes, dim, parts, rank, world, f"{type(self).__name__}: {type(module).__name__}")
        inputs, outputs = self._layouts[self.linear_dim]
        inputs = _WHOLE if type(module) in EMBEDDINGS else inputs  # ids are replicated
        outputs = self.output_layouts or outputs
        if not isinstance(outputs, (Replicate, Shard)):
            raise ValueError(f"{type(self).__name__}: output_layouts must be Replicate() or Shard(dim), not {outputs}")
        return Layout(device_mesh, own, sizes, self.input_layouts or inputs, outputs, self.use_local_output)

    def __repr__(self) -> str:
        layouts = f"input_layouts={self.input_layouts}, output_layouts={self.output_layouts}"
        return f"{type(self).__name__}({layouts}, use_local_output={self.use_local_output})"


class Colwise(_Style):
    """A ParallelStyle that shards the outputs: rows of W [N, K] of a linear layer, columns of an embedding.

    For ``parallelize_module``, on a QuantLinear, a QuantEmbedding, or an nn.Linear or nn.Embedding that
    ``qao.quantize_`` quantizes afterwards. x [..., K] is replicated, y [..., N / world] is the rank's part, split as in
    ``torch.chunk`` if the sizes do not divide. The forward has no collective; the backward all-reduces the gradient of
    x. Codes, scales and quantized activations equal those of the whole layer; results differ only if the kernel for
    N / world rows accumulates in another order.

    Args:
        input_layouts: of an x that is not a DTensor; None: Replicate().
        output_layouts: of y: Replicate() gathers it; None: Shard(-1).
        use_local_output: y as a plain tensor, not a DTensor.

    Raises:
        ValueError: the split would separate rows of a block (granularity "block") or leave a rank empty; the message
            lists the numbers of ranks that work. The module has hooks, or a weight that is not a plain tensor.
        TypeError: another module, or an already sharded one.
    """

    linear_dim = 0


class Rowwise(_Style):
    """A ParallelStyle that shards the inputs: columns of W [N, K] of a linear layer, rows of an embedding.

    As ``Colwise``, but x [..., K / world] is the rank's part and y [..., N] the sum over ranks: one all-reduce in the
    forward, no collective in the backward. The bias is added once, after the sum. Columns that share a scale stay
    together: K / world must be a multiple of the int4 group size, of a rotation block, of 128 for granularity "block".
    Each rank computes dynamic activation scales, per token or per tensor, from its own columns: this needs no further
    collective, and the scales are at most those of the whole token. ``weight_sums`` are over the rank's columns.

    An embedding returns zeros for ids of other ranks, and the sum is exact.

    Args:
        input_layouts: of an x that is not a DTensor; None: Shard(-1), Replicate() for ids.
        output_layouts: of y; Shard(1) scatters the sum along the sequence; None: Replicate().
        use_local_output: y as a plain tensor, not a DTensor.

    Raises:
        ValueError, TypeError: as in ``Colwise``.
    """

    linear_dim = 1


class _Sender:
    """Broadcasts tensors of one rank and moves them to the device of the mesh, as ``distribute_tensor`` does."""

    def __init__(self, mesh: DeviceMesh, source: int | None) -> None:
        self.mesh, self.source = mesh, source

    def __call__(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.is_meta:
            return tensor
        kind = self.mesh.device_type
        if tensor.device.type != kind:
            index = None if kind == "cpu" else torch.get_device_module(kind).current_device()
            tensor = tensor.to(torch.device(kind, index) if index is not None else kind)
        if self.source is not None and self.mesh.size() > 1:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            dist.broadcast(tensor, group=self.mesh.get_group(), group_src=self.source)
        return tensor


def _check(module: nn.Module, style: str, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ValueError(f"{style}: the mesh has {mesh.ndim} dimensions; pass one of them, such as mesh['tp']")
    if isinstance(module, Sharded):
        raise TypeError(f"{style}: this {type(module).__name__} is already sharded: {module.layout}")
    if type(module) not in LINEARS and type(module) not in EMBEDDINGS:
        raise TypeError(
            f"{style}: shards QuantLinear, QuantEmbedding, nn.Linear and nn.Embedding, not {type(module).__name__}. "
            "Quantize it first, or use a style of torch.distributed.tensor.parallel."
        )
    unsupported = unsupported_reason(module)
    if unsupported is None and isinstance(module, PackedModule):
        qweight: Any = module.qweight
        if isinstance(qweight, DTensor) and qweight.device_mesh != mesh:
            unsupported = Unsupported("its weight belongs to FSDP or another mesh")
    if unsupported is not None:
        raise ValueError(f"{style}: {type(module).__name__} cannot be sharded: {unsupported}")


def _take_part(module: Any, layout: Layout, send: _Sender) -> None:
    """Replaces a module's weight by the rank's part and turns it into a sharded layer."""
    own = layout.cut
    if isinstance(module, PackedModule):
        packed = _part_of_packed(module, layout, send)
        sums = module.weight_sums
        for name, tensor in packed.tensors().items():
            if module._parameters.get(name) is not None:
                module._parameters[name] = None if tensor is None else frozen(tensor)
        module._freeze()
        if own.dim == 1 and sums is not None:
            module.whole_sums = send(sums)
    else:
        module.weight = _part_of_parameter(module.weight, own, send)
    sizes = (own.end - own.begin, layout.sizes[1]) if own.dim == 0 else (layout.sizes[0], own.end - own.begin)
    resize(module, sizes)
    bias = module._parameters.get("bias")
    if bias is not None:
        module.bias = _part_of_parameter(bias, own if own.dim == 0 else None, send)
    give(module, layout)


# Shared weights stay shared: the parts are stored on the weight and are freed with it.


def _part_of_packed(module: PackedModule, layout: Layout, send: _Sender) -> PackedWeight:
    qweight: Any = module.qweight
    known = vars(qweight).setdefault("_qao_parts", {})
    key = (layout.mesh, layout.cut)
    if key not in known:
        if isinstance(qweight, DTensor):  # loaded as parts after ``expect``
            made = _loaded_part(module, layout)
        else:
            tensors: Any = {name: t if t is None else send(t) for name, t in module.packed.tensors().items()}
            made = part(module.scheme, PackedWeight(**tensors), layout.sizes, layout.cut)
        known[key] = made._replace(qweight=frozen(made.qweight), scales=frozen(made.scales))
    return known[key]  # type: ignore[no-any-return]


def _loaded_part(module: PackedModule, layout: Layout) -> PackedWeight:
    own: Any = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in module.packed.tensors().items()}
    packed, cut = PackedWeight(**own), layout.cut
    if cut.dim == 1 and packed.weight_sums is not None:
        plain = module.scheme.unpack(packed.qweight, packed.scales, layout.sizes[0], cut.end - cut.begin)
        sums = module.scheme._weight_sums(*plain)
        return packed._replace(weight_sums=sums)
    return packed


def _part_of_parameter(parameter: nn.Parameter, own: Cut | None, send: _Sender) -> nn.Parameter:
    whole: Any = parameter
    known = vars(whole).setdefault("_qao_parts", {})
    if own not in known and isinstance(whole, DTensor):
        known[own] = nn.Parameter(whole.to_local().detach(), parameter.requires_grad)
    elif own not in known:
        tensor = send(parameter)
        known[own] = nn.Parameter(local(tensor if own is None else own.of(tensor)), parameter.requires_grad)
    return known[own]  # type: ignore[no-any-return]


def adopt(made: QuantLinear | QuantEmbedding, floats: Any) -> None:
    """Makes a quantized layer of a rank's part sharded, as was the float layer that it replaces."""
    layout: Layout = floats.layout
    check_row_scales(made, layout, "quantize_")
    if layout.cut.dim == 1 and made.scheme.rotation and layout.sizes[1] % layout.cut.world:
        raise ValueError(
            f"quantize_: {layout.sizes[1]} columns (in_features) are divided unevenly among {layout.cut.world} ranks, "
            "so their rotations may differ. Quantize the whole weight and then shard the layer, or use rotation=0."
        )
    if layout.cut.dim == 1 and isinstance(made, QuantLinear) and made.weight_sums is not None:
        sums = made.weight_sums.detach().clone()
        if not sums.is_meta:
            dist.all_reduce(sums, group=layout.mesh.get_group())
        made.__dict__["whole_sums"] = sums
    give(made, layout)
