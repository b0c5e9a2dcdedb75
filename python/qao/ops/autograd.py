"""Autograd of the dense GEMMs: backward, forward-mode, torch.func and torch.compile.

Every GEMM is ``operator(x, weight, scales, bias, *others, *numbers)``, y = x · Wᵀ + bias, with gradients to x and bias;
quantization of x counts as the identity (straight-through). The raw operators have no autograd. If a gradient is
needed, ``product`` selects one of three wrappers: _Product, _Transformed or an operator of TRACED.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from .._version import __version__
from .batch_invariant import MODE
from .rotation import rotated
from .signature import SIGNATURES, invariant, note_signature, rotation_among, sizes_among

_qao = torch.ops.qao
# The innermost transform of torch.func, or None. Callers compare types: Dynamo evaluates those without a graph node.
_innermost = torch._C._functorch.peek_interpreter_stack
_NONE: Any = type(None)
_is_grad_enabled, _is_dynamo_compiling = torch.is_grad_enabled, torch.compiler.is_dynamo_compiling

# Each GEMM with the function that dequantizes W from (weight, scales, dtype, *sizes). ``differentiable`` fills it.
DENSE: dict[Any, Callable[..., Tensor]] = {}

# ---- eager -----------------------------------------------------------------------------------------------------------


class _Product(Function):
    """Supports backward only, with the lowest host overhead."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: tuple[Any, tuple[Any, ...]], bias: Tensor | None = None) -> Tensor:
        """``call``: the operator and its arguments without x. ``bias``: given again if it requires a gradient."""
        operator, operands = call
        # OpOverload.__call__ is a Python wrapper of _op. Adding tuples takes half the time of (x, *operands).
        y: Tensor = operator._op(*((x,) + operands))
        # save_for_backward would take 0.2 µs more, so backward compares the versions of weight and scales instead.
        try:
            ctx.product = operator, operands, operands[0]._version, operands[1]._version
        except RuntimeError as error:  # inference tensors have no version
            raise RuntimeError(
                f"{operator._schema.name}: weight or scales are inference tensors, which rule out a gradient. "
                "Copy or move the model outside torch.inference_mode(), or use copy.deepcopy(model)."
            ) from error
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        wants_x, _, *wants_bias = ctx.needs_input_grad
        grad_x, grad_bias = _gradients(ctx, grads[0], wants_x, any(wants_bias))
        return (grad_x, None, grad_bias) if wants_bias else (grad_x, None)


# Skips the Python code of Function.apply: 3 µs for torch.func, which never uses _Product.
_apply: Callable[..., Tensor] = super(Function, _Product).apply


def of_parts(multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies ``multiply`` to all rows of a strided nested x [B, *, K], which autograd.Function does not accept."""
    parts = x.unbind()
    rows = [part.reshape(-1, x.size(-1)) for part in parts]
    products = multiply(torch.cat(rows)).split([len(some) for some in rows])
    return torch.nested.as_nested_tensor(
        [some.view(*part.shape[:-1], -1) for some, part in zip(products, parts, strict=True)]
    )


def _gradients(ctx: Any, grad: Tensor, wants_x: bool, wants_bias: bool) -> tuple[Tensor | None, Tensor | None]:
    grad_x = grad @ _dense(ctx, grad.dtype) if wants_x else None
    if not wants_bias:
        return grad_x, None
    plain = grad.values() if grad.is_nested else grad
    return grad_x, plain.sum_to_size(plain.shape[-1:]).to(ctx.product[1][2].dtype)


def _dense(ctx: Any, dtype: torch.dtype) -> Tensor:
    operator, operands, *versions = ctx.product
    weight, scales = ctx.saved_tensors or operands[:2]
    if versions and not _is_dynamo_compiling() and versions != [weight._version, scales._version]:
        raise RuntimeError(
            f"{operator._schema.name}: weight or scales have been modified by an inplace operation since the forward "
            f"pass of this gradient. Got weight {list(weight.shape)}, scales {list(scales.shape)}. Run it again."
        )
    numbers = operands[SIGNATURES[operator].tensors - 1 :]  # operands start after x
    sizes = sizes_among(operator, numbers)
    if size := rotation_among(operator, numbers):
        return rotated(DENSE[operator](weight, scales, torch.float32, *sizes), size).to(dtype)
    return DENSE[operator](weight, scales, dtype, *sizes)


# ---- forward-mode and torch.func -------------------------------------------------------------------------------------


def transformed() -> bool:
    """Whether a torch.func transform or forward-mode AD is active."""
    if type(_innermost()) is _NONE and forward_ad._current_level < 0:
        return False
    _break_graph()
    return True


def _break_graph() -> None:
    """Forces a graph break: Dynamo does not know which derivatives are needed and would make them zero."""
    if _is_dynamo_compiling():
        raise RuntimeError(
            "qao: a graph cannot contain torch.func or forward-mode around a quantized layer. Without fullgraph=True "
            "they run eagerly."
        )


class _Transformed(Function):
    """Supports backward, jvp and vmap and their compositions, at 30 µs per call."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, weight: Tensor, scales: Tensor, operator: Any, *rest: Any) -> Tensor:
        return operator(x, weight, scales, bias, *rest)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, bias, weight, scales, operator, *rest = inputs
        ctx.save_for_backward(weight, scales)
        ctx.save_for_forward(weight, scales)
        ctx.product = operator, (weight, scales, bias, *rest)
        ctx.dtype, ctx.shape = output.dtype, output.shape

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        wants_x, wants_bias, *frozen = ctx.needs_input_grad
        return *_gradients(ctx, grads[0], wants_x, wants_bias), *(None for _ in frozen)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        of_x, of_bias, *_ = tangents
        parts = [of_x @ _dense(ctx, ctx.dtype).t()] if of_x is not None else []
        if of_bias is not None:
            parts.append(of_bias.to(ctx.dtype).expand(ctx.shape))
        tangent: Tensor = sum(parts[1:], start=parts[0])
        return tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        x, bias, weight, scales, operator, *rest = arguments
        of_x, of_bias, of_weight, of_scales, _, *of_rest = in_dims
        dims = of_x, of_weight, of_scales, of_bias, *of_rest
        return batched(_whole(operator), operator, info.batch_size, dims, x, weight, scales, bias, *rest)


def batched(
    call: Callable[..., Tensor], operator: Any, batch: int, dims: tuple[Any, ...], *arguments: Any
) -> tuple[Tensor, int]:
    """vmap of ``call``, a GEMM by ``operator``. ``dims`` has the batch dimension of each argument, or None.

    Raises:
        RuntimeError: an argument other than x and bias has a batch dimension.
    """
    x, weight, scales, bias, *rest = arguments
    of_x, of_weight, of_scales, of_bias, *of_rest = dims
    if any(dim is not None for dim in (of_weight, of_scales, *of_rest)):
        raise RuntimeError(
            f"{operator._schema.name}: vmap over a quantized weight is not supported: only x and bias may have a "
            f"vmap dimension. Got in_dims x: {of_x}, weight: {of_weight}, scales: {of_scales}, bias: {of_bias}, "
            f"weight {list(weight.shape)}. Call the layers one by one, or dequantize_ the model for an ensemble."
        )
    if of_x is None:  # then bias has a batch dimension
        y = call(x, weight, scales, None, *rest).unsqueeze(0)
    else:
        x = x.movedim(of_x, 0)
        plain = bias if of_bias is None else None
        one_scale = operator is _qao.fp8_fp8_mm.default and len(rest) > 1 and rest[0] is None and rest[1] == 0
        if one_scale:  # dynamic per-tensor scale: one for each x of the batch
            y = torch.stack([call(part, weight, scales, plain, *rest) for part in x.unbind(0)])
        else:
            y = call(x, weight, scales, plain, *rest)
    if of_bias is not None:
        bias = bias.movedim(of_bias, 0)
        y = (y + bias.view(batch, *(1,) * (y.dim() - 2), -1)).to(y.dtype)
    return y, 0


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def traced(operator: Any, function: Callable[..., Any]) -> Any:
    """Registers ``function``, the differentiable version of ``operator``, as an operator for Dynamo graphs.

    AOTAutograd decomposes it. With an autograd.Function instead, the compiled graph could not be cached. The
    decomposition is not part of the cache key, so the version of qao is part of the operator's name.
    """
    word = operator._schema.name.partition("::")[2]
    name = f"{word}_{__version__.replace('.', '_')}"
    if not hasattr(torch.ops.qao_with_grad, name):  # defined by an earlier import of the package
        _library.define(name + str(operator._schema).partition(word)[2])
        _library.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.qao_with_grad, name).default


def _whole(operator: Any) -> Callable[..., Tensor]:
    """``product`` with the arguments of the operator."""
    tensors = SIGNATURES[operator].tensors
    return lambda *arguments: product(operator, arguments[tensors:], *arguments[:tensors])


_library = torch.library.Library("qao_with_grad", "FRAGMENT")
TRACED: dict[Any, Any] = {}


def differentiable(operator: Any, dense: Callable[..., Tensor]) -> Any:
    """Registers a GEMM for autograd and returns it. ``dense`` makes W from (weight, scales, dtype, *sizes)."""
    note_signature(operator)
    DENSE[operator], TRACED[operator] = dense, traced(operator, _whole(operator))
    return operator


def product(
    operator: Callable[..., Tensor],
    constants: tuple[Any, ...],
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    *others: Any,
) -> Tensor:
    """Differentiable ``operator(x, weight, scales, bias, *others, *constants)`` with an operator of DENSE.

    ``others``: further tensors; all of them, some may be None, if there are ``constants``.

    Layers call it directly: a wrapper adds 1 % to the function calls that compile a layer.
    """
    if MODE.on:
        others, constants = invariant(operator, others, constants)
    if type(_innermost()) is not _NONE or forward_ad._current_level >= 0:
        _break_graph()
        return _Transformed.apply(x, bias, weight, scales, operator, *others, *constants)  # type: ignore[no-untyped-call, no-any-return]
    if _is_grad_enabled():
        trained = bias if bias is not None and bias.requires_grad else None
        try:
            wanted = trained is not None or x.requires_grad
        except AttributeError:  # x is not a tensor: the operator raises
            wanted = False
        if wanted:
            if _is_dynamo_compiling():
                return TRACED[operator](x, weight, scales, bias, *others, *constants)  # type: ignore[no-any-return]
            call = operator, (weight, scales, bias) + others + constants
            try:  # each argument that is not a tensor costs 0.06 µs in apply
                return _apply(x, call) if trained is None else _apply(x, call, trained)
            except RuntimeError:
                if not (x.is_nested and x.layout == torch.strided):
                    raise
                return of_parts(lambda rows: product(operator, constants, rows, weight, scales, bias, *others), x)
    return operator(x, weight, scales, bias, *others, *constants)
