"""vmap rules, nested-tensor kernels and the gradient of hadamard, registered by import."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from .autograd import DENSE, batched, of_parts
from .gguf import over_batch

_qao = torch.ops.qao
_library = torch.library.Library("qao", "FRAGMENT")

# ---- vmap ------------------------------------------------------------------------------------------------------------


def _register_product(operator: Any) -> None:
    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        return batched(operator, operator, info.batch_size, in_dims, *arguments)

    torch.library.register_vmap(operator._schema.name, rule)


def _register_rows(operator: Any, rows: int) -> None:
    """vmap rule of a row-wise operator. Its first ``rows`` arguments are [..., K] or None."""
    name = operator._schema.name

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        if any(dim is not None for dim in in_dims[rows:]):
            raise RuntimeError(
                f"{name}: vmap over a weight is not supported. Got in_dims {in_dims}; "
                f"the first {rows} may have a vmap dimension. Call it once per weight."
            )
        moved = [
            tensor
            if tensor is None
            else tensor.expand(info.batch_size, *tensor.shape)
            if dim is None
            else tensor.movedim(dim, 0)
            for tensor, dim in zip(arguments[:rows], in_dims, strict=False)
        ]
        result = operator(*moved, *arguments[rows:])
        return result, (0,) * len(result) if isinstance(result, tuple) else 0

    torch.library.register_vmap(name, rule)


# ---- the gradient of hadamard, which is its own inverse ----


def _keep_size(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.size = inputs[1]


def _rotate_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _qao.hadamard.default(grad, ctx.size), None


# ---- nested tensors --------------------------------------------------------------------------------------------------


def _register_jagged(operator: Any) -> None:
    """x [B, j, ..., K] with jagged j: applies the GEMM to its values and keeps the structure."""

    def rule(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        x, *others = args
        if not isinstance(x, NestedTensor) or x._ragged_idx == x.dim() - 1:
            raise RuntimeError(
                f"{operator._schema.name}: only x may be a jagged nested tensor, and its jagged dimension must not be "
                f"the last. Got {', '.join(_layout(tensor) for tensor in args if isinstance(tensor, Tensor))}"
                ". Transpose x, or take its .values()."
            )
        structure = {"_metadata_cache": x._metadata_cache, "_ragged_idx": x._ragged_idx}
        return NestedTensor(operator(x._values, *others), offsets=x.offsets(), lengths=x.lengths(), **structure)

    name = operator._schema.name
    _library.impl(name, torch.library.fallthrough_kernel, "AutogradNestedTensor")
    torch.library.register_torch_dispatch(name, NestedTensor, rule)


def _register_strided(operator: Any) -> None:
    names = [argument.name for argument in operator._schema.arguments]

    def rule(x: Tensor, *others: Any) -> Tensor:
        nested = [
            name
            for name, tensor in zip(names, (x, *others), strict=False)
            if isinstance(tensor, Tensor) and tensor.is_nested
        ]
        if nested != ["x"]:
            raise RuntimeError(
                f"{operator._schema.name}: only x may be a nested tensor. Got {', '.join(nested)}. Pass the others as "
                "plain tensors; .unbind() returns them."
            )
        return of_parts(lambda rows: operator(rows, *others), x)

    for device in ("CPU", "CUDA"):
        _library.impl(operator._schema.name, rule, f"NestedTensor{device}")


def _layout(tensor: Tensor) -> str:
    return f"{str(tensor.layout).removeprefix('torch.')} {list(tensor.shape)}"


def _register() -> None:
    for operator in DENSE:
        _register_product(operator)
        _register_jagged(operator)
        _register_strided(operator)
    _register_jagged(_qao.gguf_mm.default)
    _register_strided(_qao.gguf_mm.default)
    torch.library.register_vmap("qao::gguf_mm", partial(over_batch, _qao.gguf_mm.default))
    torch.library.register_autograd("qao::hadamard", _rotate_back, setup_context=_keep_size)
    for operator, rows in (
        (_qao.add_rms_norm.default, 2),
        (_qao.silu_mul.default, 2),
        (_qao.swiglu.default, 1),
        (_qao.hadamard.default, 1),
        (_qao.int4_embedding.default, 1),
        (_qao.int8_embedding.default, 1),
        (_qao.gguf_embedding.default, 1),
    ):
        _register_rows(operator, rows)


# The rules outlive a second import of the package.
if not torch._C._dispatch_has_kernel_for_dispatch_key("qao::int4_mm", "FuncTorchBatched"):
    _register()
