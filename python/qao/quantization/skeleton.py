"""Schemes of a model's quantized modules, and empty quantized modules for loading a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..nn.attributes import carry_attributes
from ..nn.eligibility import is_embedding, is_fused, kind_of, projections_of, unsupported_reason
from ..nn.embedding import QuantEmbedding, rename_ties
from ..nn.experts import QuantExperts, expert_sizes
from ..nn.linear import QuantLinear, class_of_linear, kernel_bias
from ..nn.packed_module import PackedModule
from ..schemes import Int4Weight, Scheme
from . import fused_experts
from .module_swap import put_module

Undo = list[tuple[nn.Module, str, nn.Module]]  # parent, attribute, the module that was there


def describe(model: nn.Module) -> dict[str, Scheme]:
    """Schemes of the quantized modules of ``model`` (``exact_scheme``) by name, one name each."""
    return {name: exact_scheme(module) for name, module in model.named_modules() if isinstance(module, PackedModule)}


def float_dtype(model: nn.Module) -> torch.dtype | None:
    """Dtype of the float weights that the quantized modules replace; None without quantized modules."""
    return next((module.dtype for module in model.modules() if isinstance(module, PackedModule)), None)


def exact_scheme(module: PackedModule) -> Scheme:
    """The scheme with the dtype of the module's scales, independent of the model's present dtype."""
    scheme = module.scheme
    return replace(scheme, scale_dtype=module.scales.dtype) if isinstance(scheme, Int4Weight) else scheme


def prepare_layers(
    model: nn.Module,
    schemes: Mapping[str, Scheme],
    *,
    sizes: Mapping[str, tuple[int, int]] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    on_meta: bool = True,
) -> Undo:
    """Replaces modules of ``model`` by quantized modules on meta, before loading a checkpoint.

    Modules with several places keep all of them, and shared weights stay shared.

    Args:
        model: in float, or already quantized.
        schemes: schemes by module name.
        sizes: (N, K) in the checkpoint by name; checked.
        dtypes: of the float weights by name; default: those of the replaced modules.
        on_meta: False: uninitialized tensors on the devices of the replaced modules, with their biases.

    Returns:
        The argument of ``undo``.

    Raises:
        ValueError: no module has that name, or it is not a linear layer or embedding, cannot be replaced by a
            QuantLinear, was compiled alone, or has other sizes. The model is unchanged.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    successors: dict[int, nn.Module] = {}  # by the id of the replaced module
    owners: dict[tuple[int, Scheme], PackedModule] = {}  # by the id of its float weight
    plain, experts = _apart(schemes, modules)
    for name, parts in experts.items():
        successors[id(modules[name])] = _empty_experts(name, modules[name], parts, sizes or {}, dtypes or {}, on_meta)
    for name, scheme in plain.items():
        module = modules.get(name)
        if module is None:
            raise ValueError(
                f"{name}: the checkpoint has a quantized layer, but {type(model).__name__} has no module of this name"
            )
        if id(module) in successors:
            continue
        weight, dtype, size = _weight_of(name, module, (sizes or {}).get(name))
        first = owners.get((id(weight), scheme))
        made = _make(module, weight, size, (dtypes or {}).get(name, dtype), scheme, first, on_meta)
        if first is not None:
            made.tie(first)
        owners.setdefault((id(weight), scheme), made)
        successors[id(module)] = made
    names = {id(modules[name]): name for name in plain} | {id(modules[name]): name for name in experts}
    for parent in model.modules():  # the wrapper's forward is bound to the compiled child
        child = parent._modules.get("_orig_mod") if type(parent).__name__ == "OptimizedModule" else None
        if id(child) in successors:
            raise ValueError(
                f"{names[id(child)]}: the checkpoint has a quantized layer here, but torch.compile was called on the "
                "module and keeps it. Load first, then compile."
            )
    done: Undo = []
    for parent in list(model.modules()):
        for attribute, child in list(parent._modules.items()):
            if child is not None and id(child) in successors:
                done.append((parent, attribute, child))
                put_module(parent, attribute, successors[id(child)])
    rename_ties(model)
    return done


def _apart(
    schemes: Mapping[str, Scheme], modules: Mapping[str, nn.Module]
) -> tuple[dict[str, Scheme], dict[str, dict[str, Scheme]]]:
    """Schemes of whole layers, and by the names of experts the schemes of their projections, "up" and "down"."""
    plain: dict[str, Scheme] = {}
    experts: dict[str, dict[str, Scheme]] = {}
    for name, scheme in schemes.items():
        parent, _, key = name.rpartition(".")
        owner = modules.get(parent)
        if owner is not None and (is_fused(owner) or isinstance(owner, QuantExperts)):
            experts.setdefault(parent, {})[key] = scheme
        else:
            plain[name] = scheme
    return plain, experts


def _empty_experts(
    name: str,
    module: nn.Module,
    schemes: Mapping[str, Scheme],
    sizes: Mapping[str, tuple[int, int]],
    dtypes: Mapping[str, torch.dtype],
    on_meta: bool,
) -> QuantExperts:
    quantized = isinstance(module, QuantExperts)
    origin: Any = module.skeleton() if isinstance(module, QuantExperts) else module
    unsupported = None if quantized else unsupported_reason(origin)
    if sorted(schemes) != ["down", "up"] or unsupported is not None:
        raise ValueError(
            f"{name}: the checkpoint has quantized experts here, which cannot be replaced: "
            f"{unsupported or 'up and down must share one scheme, but it has ' + ', '.join(schemes)}"
        )
    packed = {}
    for part, key in zip(("up", "down"), projections_of(origin), strict=True):
        weight = origin._parameters[key]
        count, n, k = expert_sizes(origin, weight)
        given = sizes.get(f"{name}.{part}", (n, k))
        if tuple(given) != (n, k):
            raise ValueError(
                f"{name}.{part}: the checkpoint has weights {list(given)}, but the model has {[n, k]}: another model?"
            )
        dtype = dtypes.get(f"{name}.{part}", weight.dtype)
        device = "meta" if on_meta else weight.device
        packed[key] = schemes[part], schemes[part].empty(n, k, dtype=dtype, device=device, experts=count)
    made = fused_experts.assemble(origin, packed)
    for part, projection in (("up", made.up), ("down", made.down)):
        projection.dtype = dtypes.get(f"{name}.{part}", projection.dtype)
    return made


def undo(done: Undo) -> None:
    for parent, attribute, module in done:
        put_module(parent, attribute, module)


def _weight_of(
    name: str, module: nn.Module, size: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.dtype, tuple[int, int]]:
    """The Parameter that the checkpoint's weight replaces, with the dtype and [N, K] of the float weight."""
    kind = kind_of(module)
    if isinstance(module, PackedModule):
        found = module.qweight, module.dtype, module._sizes
    elif kind in ("linear", "conv1d", "embedding"):
        if unsupported := unsupported_reason(module):
            raise ValueError(
                f"{name}: the checkpoint has a quantized layer here, which cannot be replaced: {unsupported}"
            )
        weight: Any = module._parameters["weight"]
        n, k = weight.shape
        found = weight, weight.dtype, (k, n) if kind == "conv1d" else (n, k)
    else:
        raise ValueError(f"{name}: the checkpoint has a quantized layer, but the model has a {type(module).__name__}")
    if size is not None and tuple(size) != found[2]:
        raise ValueError(
            f"{name}: the checkpoint has a weight {list(size)}, but the model has {list(found[2])}: another model?"
        )
    return found


def _make(
    module: nn.Module,
    weight: torch.Tensor,
    size: tuple[int, int],
    dtype: torch.dtype,
    scheme: Scheme,
    first: PackedModule | None,
    on_meta: bool,
) -> PackedModule:
    n, k = size
    device = torch.device("meta") if on_meta else weight.device
    own = scheme.empty(n, k, dtype=dtype, device=device) if first is None or not first.needs_all else first.packed
    packed = own if first is None else first.packed._replace(weight_sums=own.weight_sums, row_scales=own.row_scales)
    made: PackedModule
    if isinstance(module, QuantEmbedding):
        made = QuantEmbedding(n, k, scheme, packed, dtype, module.padding_idx, module.embed_scale)
    elif is_embedding(module):
        made = QuantEmbedding.from_packed(module, scheme, packed)
        made.dtype = dtype
    else:
        bias = module._parameters.get("bias")
        empty: torch.Tensor | None = None
        if bias is not None:
            empty = torch.empty_like(bias, device="meta", dtype=dtype) if on_meta else kernel_bias(bias.clone(), device)
        made = QuantLinear(k, n, scheme, packed, empty, dtype)
        made.stands_for = module.stands_for if isinstance(module, QuantLinear) else class_of_linear(module)
    carry_attributes(module, made)
    return made.train(module.training)
