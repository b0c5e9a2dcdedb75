"""Pass: linear layers that read one input become one operator of several weights.

The operator packs or quantizes the input once. On a CPU its threads start once for all weights; on Hopper one kernel
multiplies up to 128 tokens with several int4 weights, where that is faster than one kernel for each.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..ops.merged_mm import MERGED
from . import norms
from .nodes import arguments, call, is_input, value
from .report import Report

_QUANTIZE_X = tuple(
    getattr(torch.ops.qao, name).default for name in ("int8_int8_mm", "int8_int4_mm", "fp8_fp8_mm", "fp8_int4_mm")
)
_LISTS = "weight", "scales", "bias", "weight_sums", "out_features"  # arguments of the operator that are lists


def merge_products(graph: Graph, report: Report) -> None:
    """Merge products of one input in ``graph``, in place."""
    for nodes in _alike(graph):
        given = [arguments(node) for node in nodes]
        merged = MERGED[nodes[0].target]
        with graph.inserting_before(nodes[0]):
            y = call(graph, nodes[0], merged, *_joined(merged, given))
            results = [call(graph, node, operator.getitem, y, index) for index, node in enumerate(nodes)]
        for node, result in zip(nodes, results, strict=True):
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        report.replace(f"one product of several weights ({merged._opname.removeprefix('_merged_')})", *nodes)


def _alike(graph: Graph) -> list[list[Node]]:
    """Groups of at least two products that one operator computes, in the order of the graph."""
    groups: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in MERGED:
            given = arguments(node)
            if _merges(node, given) and not _special(given):
                groups.setdefault((node.target, *_shared(given)), []).append(node)
    return [nodes for nodes in groups.values() if len(nodes) > 1]


def _merges(node: Node, given: dict[str, Any]) -> bool:
    if value(node).device.type == "cpu":
        return True
    return node.target in _QUANTIZE_X or (node.target is torch.ops.qao.int4_mm.default and norms.takes(given["x"]))


def _special(given: dict[str, Any]) -> bool:
    """Whether the product has operands that the operator of several weights lacks, or that are computed later."""
    if given.get("batch_invariant") or given.get("row_scales") is not None:
        return True
    operands = (given.get(name) for name in _LISTS)
    return any(isinstance(operand, Node) and not is_input(operand) for operand in operands)


def _shared(given: dict[str, Any]) -> Iterator[Any]:
    """What must be equal: x and every argument that is no list, and the form of the weight and its scales."""
    yield from (argument for name, argument in given.items() if name not in _LISTS)
    yield given.get("weight_sums") is None, bool(given.get("out_features"))
    yield from (_form(value(given[name])) for name in ("weight", "scales") if name in given)


def _form(tensor: Tensor) -> Any:
    return tensor.dtype, tensor.dim(), tuple(tensor.shape[1:])


def _joined(merged: Any, given: list[dict[str, Any]]) -> list[Any]:
    """Arguments of the operator of several weights, in the order of its schema."""
    first = given[0]
    return [
        (
            [each[argument.name] for each in given]
            if first.get("out_features") or argument.name != "out_features"
            else []
        )
        if argument.name in _LISTS
        else first[argument.name]
        for argument in merged._schema.arguments
    ]
