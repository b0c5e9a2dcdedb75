"""Pass: counters that a step increments by one number become ``_foreach_add``, which Inductor makes one kernel.

Each layer of transformers' static cache counts its tokens. On a GPU Inductor launches a kernel of 1.3 us per counter.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from .nodes import aten, call, on_gpu, value
from .report import Report

_INTEGERS = torch.int64, torch.int32


def join_counters(graph: Graph, report: Report) -> None:
    """Join increments of the inputs of ``graph``, in place."""
    groups: dict[Any, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if _is_increment(node) and on_gpu(node):
            groups.setdefault((node.args[1], value(node).dtype, value(node).device), []).append(node)
    for nodes in groups.values():
        if len(nodes) > 1:
            _join(graph, nodes)
            for node in nodes:
                report.replace(f"one increment of {len(nodes)} counters", node)


def _is_increment(node: Node) -> bool:
    """Whether ``node`` adds a number to an input with one integer, and is used only as the input's new value."""
    if len(node.args) != 2 or node.kwargs:
        return False
    counter, amount = node.args
    if not isinstance(counter, Node) or counter.op != "placeholder" or type(amount) is not int:
        return False
    result = value(node)
    single = all(isinstance(size, int) and size == 1 for size in result.shape)
    if not single or result.dtype not in _INTEGERS or result.dtype != value(counter).dtype:
        return False
    return [(user.target, *user.args) for user in node.users] == [(aten.copy_.default, counter, node)]


def _join(graph: Graph, nodes: list[Node]) -> None:
    # As late as possible: Inductor adds in place only if nothing reads a counter behind the addition.
    with graph.inserting_before(min(user for node in nodes for user in node.users)):
        sums = call(graph, nodes[0], aten._foreach_add.Scalar, [node.args[0] for node in nodes], nodes[0].args[1])
        for index, node in enumerate(nodes):
            node.replace_all_uses_with(call(graph, node, operator.getitem, sums, index))
            graph.erase_node(node)
