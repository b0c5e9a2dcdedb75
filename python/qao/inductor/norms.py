"""Pass: RMSNorm with a residual, products of the result, and a SiLU gate become one operator.

For few tokens on Hopper the operator is one kernel, in which every CTA makes the norm while its first weights arrive.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ..ops.merged_mm import FUSED, MERGED
from .nodes import arguments, aten, call, is_call, is_input, on_hopper, rows_of, value
from .report import Report

MOST_TOKENS = 8  # up to which weights of int4 stream past an x that a CTA holds
_PRODUCT = torch.ops.qao.int4_mm.default
_cast = torch.ops.prims.convert_element_type.default
_mul, _add = aten.mul.Tensor, aten.add.Tensor
_16_BITS = torch.bfloat16, torch.float16


class _Norm(NamedTuple):
    """RMSNorm of ``x``."""

    x: Node
    weight: Node
    eps: float


def fuse_norms(graph: Graph, report: Report) -> None:
    """Replace norms in front of int4 products in ``graph``, in place."""
    for node in [*graph.nodes]:
        if node.op != "call_function" or node.target not in (_PRODUCT, MERGED[_PRODUCT]):
            continue
        given = arguments(node)
        x = given["x"]
        if not applies(x) or given.get("batch_invariant"):
            continue
        norm = _rms_norm(x) if set(x.users) == {node} else None
        if norm is None:
            continue
        lists = {name: _list(node, given, name) for name in ("weight", "scales", "bias", "out_features")}
        operands = [norm.x, norm.weight, *lists["weight"], *lists["scales"], *filter(None, lists["bias"])]
        start = max(operands)  # in the order of the graph
        if start is norm.x or is_input(norm.x):
            _replace(graph, report, node, norm, start, lists, given)


def applies(x: Node) -> bool:
    """Whether few tokens are multiplied on a GPU with the kernel."""
    rows = rows_of(x)
    return on_hopper(x) and value(x).dtype == torch.bfloat16 and rows is not None and 1 <= rows <= MOST_TOKENS


def _list(node: Node, given: dict[str, Any], name: str) -> list[Any]:
    """The argument of all weights; an operator of one weight has no list. Sizes that are not given are left out."""
    if node.target is not _PRODUCT:
        return list(given[name])
    return [] if name == "out_features" and not given[name] else [given[name]]


def _replace(
    graph: Graph, report: Report, node: Node, norm: _Norm, start: Node, lists: dict[str, Any], given: dict[str, Any]
) -> None:
    while start.next.op in ("placeholder", "get_attr"):
        start = start.next
    summands = _summands(norm.x)
    x, residual = summands or (norm.x, None)
    single = node.target is _PRODUCT
    products = [node] if single else _results(node)
    gate = _silu_gate(_halves(node) if single else products)
    if gate is not None and gate.swapped:
        gate = None if single else gate
        lists = {name: items[::-1] for name, items in lists.items()}
    target = FUSED
    if single and gate is not None:  # one weight of gate and up
        target = torch.ops.qao.add_rms_norm_int4_mm.default
        lists = {name: items[0] if items else 0 for name, items in lists.items()}
    with graph.inserting_before(start.next):
        fused = call(
            graph, node, target, x, residual, norm.weight, lists["weight"], lists["scales"], lists["bias"], norm.eps,
            lists["out_features"], given["in_features"], given["group_size"], gate is not None,
        )  # fmt: skip
        *ys, total = (call(graph, node, operator.getitem, fused, i) for i in range(len(value(fused))))
    for old, new in zip(products if gate is None else [gate.y], ys, strict=True):
        if old is not None:
            old.replace_all_uses_with(new)
    if summands is not None:
        norm.x.replace_all_uses_with(total)
    count = "1 product" if single else f"{len(products)} products"
    parts = ["RMSNorm", count, *(["SiLU gate"] if gate else [])]
    report.replace(f"one operator of {', '.join(parts)} (int4_mm)", node)


def _halves(node: Node) -> list[Any]:
    """The nodes that take the halves of the columns of a result, if they are its only users."""
    for user in node.users:
        if not is_call(user, aten.split.Tensor) or len(node.users) > 1:
            return []
        size, dim = arguments(user)["split_size"], arguments(user)["dim"]
        if 2 * size == value(node).shape[-1] and dim in (-1, value(node).dim() - 1):
            return _results(user)
    return []


def _results(node: Node) -> list[Any]:
    """The nodes that take the results of an operator with several; None for one that is not used."""
    found: list[Any] = [None] * len(value(node))
    for user in node.users:
        found[user.args[1]] = user  # type: ignore[index]
    return found


def _summands(node: Node) -> tuple[Node, Node] | None:
    """Both operands of an addition of two tensors of one shape and dtype."""
    for residual, x in _either(node, _add):
        if isinstance(x, Node) and isinstance(residual, Node):
            sizes = {(value(each).shape, value(each).dtype) for each in (x, residual, node)}
            return (x, residual) if len(sizes) == 1 else None
    return None


# ---- patterns --------------------------------------------------------------------------------------------------------


def _either(node: Any, target: Any) -> Iterator[tuple[Any, Any]]:
    """Both orders of the operands of a commutative operator."""
    if is_call(node, target) and len(node.args) == 2 and not node.kwargs:
        yield node.args
        yield node.args[::-1]


def _rms_norm(y: Node) -> _Norm | None:
    """The norm that makes ``y``: weight * normalized.to(dtype), as Llama has it, or (weight * normalized).to(dtype)."""
    if is_call(y, _cast):
        pairs = ((_uncast(weight) or weight, normalized) for weight, normalized in _either(y.args[0], _mul))
    else:
        pairs = ((weight, _uncast(normalized)) for weight, normalized in _either(y, _mul))
    for weight, normalized in pairs:
        found = _normalized(normalized)
        if found is None or not is_input(weight):
            continue
        x, eps = found
        if value(weight).shape == value(x).shape[-1:] and value(weight).dtype == value(x).dtype == value(y).dtype:
            return _Norm(x, weight, eps)
    return None


def _uncast(node: Any) -> Any:
    return node.args[0] if is_call(node, _cast) else None


def _normalized(node: Any) -> tuple[Node, float] | None:
    """x and eps of x * rsqrt(mean(x²) + eps) in float32, of a 16-bit x."""
    for wide, factor in _either(node, _mul):
        x = _uncast(wide)
        if x is None or value(x).dtype not in _16_BITS or not is_call(factor, aten.rsqrt.default):
            continue
        for mean, eps in _either(factor.args[0], _add):
            if not isinstance(eps, float) or not is_call(mean, aten.mean.dim):
                continue
            square, dims, *keep = mean.args
            last = [value(x).dim() - 1]
            if is_call(square, aten.pow.Tensor_Scalar) and square.args == (wide, 2) and keep == [True]:
                if dims in ([-1], last):
                    return x, eps
    return None


class _Gate(NamedTuple):
    """SiLU(gate) * up. ``swapped``: up is the first product."""

    y: Node
    swapped: bool


def _silu_gate(products: list[Any]) -> _Gate | None:
    """The gate that is the only user of two products of one size."""
    if len(products) != 2 or None in products or value(products[0]).shape != value(products[1]).shape:
        return None
    for index, (gate, up) in enumerate((products, products[::-1])):
        if len(up.users) == 1 and len(gate.users) == 1:
            (y,) = up.users
            for other, silu in _either(y, _mul):
                if other is up and _silu(silu) is gate and len(silu.users) == 1:
                    return _Gate(y, index == 1)
    return None


def _silu(node: Any) -> Any:
    """x of (x / (1 + exp(-x))).to(dtype) in float32, which is what SiLU is decomposed to."""
    ratio = _uncast(node)
    if not is_call(ratio, aten.div.Tensor):
        return None
    wide, below = ratio.args
    for exponential, one in _either(below, _add):
        if one == 1 and is_call(exponential, aten.exp.default) and is_call(exponential.args[0], aten.neg.default):
            return _uncast(wide) if exponential.args[0].args[0] is wide else None
    return None
