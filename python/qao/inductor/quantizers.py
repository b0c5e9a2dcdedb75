"""Pass: a norm or a gate, and the quantization in front of the products that read it, become one operator.

The products become those that take an x in 8 bits, with the same weights. x is rounded to 8 bits from float32, and not
from the dtype of the model.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from .nodes import arguments, call, inserting_behind, on_gpu, replace_behind, value
from .patterns import FindNorm, Gate, Norm, rms_norm, silu_gate
from .report import Report

_INT8, _FP8 = torch.ops.qao.int8_int8_mm.default, torch.ops.qao.fp8_fp8_mm.default


def fuse_quantization(graph: Graph, report: Report, find_norm: FindNorm = rms_norm) -> None:
    """Replace norms and gates in front of products that quantize x in ``graph``, in place."""
    for x, products in _by_x(graph).items():
        formats = {_format(product) for product in products}
        made = find_norm(x) or silu_gate(x)
        if made is None or not on_gpu(x):
            continue
        what = "RMSNorm" if isinstance(made, Norm) else "SiLU gate"
        if formats != {products[0].target} or len(x.users) > len(products):
            report.leave(f"{what} and quantization: the result has other users, or scales that are not per token", x)
            continue
        report.replace(f"one operator of {what} and quantization", *products)
        _replace(graph, x, made, products)


def _by_x(graph: Graph) -> dict[Node, list[Node]]:
    """Products that quantize x, by x, in the order of the graph."""
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (_INT8, _FP8):
            found.setdefault(arguments(node)["x"], []).append(node)
    return found


def _format(product: Node) -> Any:
    """The product's operator if it quantizes x symmetrically with a scale per token; None otherwise."""
    given = arguments(product)
    if product.target is _INT8:
        plain = given["weight_sums"] is None and not given["x_rotation"]
    else:
        plain = given["x_scale"] is None and given["x_group_size"] == -1
    return product.target if plain else None


def _replace(graph: Graph, x: Node, made: Norm | Gate, products: list[Node]) -> None:
    dtype = torch.int8 if products[0].target is _INT8 else torch.float8_e4m3fn
    if isinstance(made, Norm):
        target, *operands = torch.ops.qao.add_rms_norm_quantize.default, *made[:4]
        if made.residual is None:
            target = torch.ops.qao.rms_norm_quantize.default
            del operands[1]
        with inserting_behind(graph, max([made.last, *made.weights])):
            fused = call(graph, x, target, *operands, dtype)
            q, scales, *total = (call(graph, x, operator.getitem, fused, i) for i in range(len(value(fused))))
        if total:
            replace_behind(made.total, total[0])
    else:
        with inserting_behind(graph, max(made)):
            fused = call(graph, x, torch.ops.qao.silu_mul_quantize.default, *made, dtype)
            q, scales = (call(graph, x, operator.getitem, fused, i) for i in range(2))
    for product in products:
        with graph.inserting_before(product):
            y = call(graph, product, *_scaled_mm(product, q, scales))
        product.replace_all_uses_with(y)
        graph.erase_node(product)


def _scaled_mm(product: Node, q: Node, scales: Node) -> tuple[Any, ...]:
    """The operator of a quantized x that computes ``product``, and its arguments."""
    given = arguments(product)
    weight, dtype = (given["weight"], given["scales"], given["bias"]), value(product).dtype
    if product.target is _INT8:
        operands: tuple[Any, ...] = (q, scales, None, *weight, None, dtype)
        return torch.ops.qao.int8_scaled_mm.default, *operands, given["batch_invariant"]
    return torch.ops.qao.fp8_scaled_mm.default, q, scales, *weight, dtype, given["fast_accum"], given["batch_invariant"]
