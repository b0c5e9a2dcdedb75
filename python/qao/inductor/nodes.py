"""Helpers of the passes: sizes and operands of nodes, and new nodes with fake values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

aten: Any = torch.ops.aten
_ORIGIN = "nn_module_stack", "stack_trace", "source_fn_stack"


def value(node: Node) -> Tensor:
    """The fake tensor that stands for a node's result."""
    return node.meta["val"]  # type: ignore[no-any-return]


def arguments(node: Node) -> dict[str, Any]:
    """All arguments of an operator's node by name, with defaults."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)}
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    return {**defaults, **given, **node.kwargs}


def is_call(node: Any, *targets: Any) -> bool:
    """Whether ``node`` is a call of one of these operators."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def is_input(node: Any) -> bool:
    """Whether ``node`` is available from the first node of the graph on."""
    return isinstance(node, Node) and node.op in ("placeholder", "get_attr")


def rows_of(node: Node) -> int | None:
    """Product of all sizes of a result but the last; None if one of them is dynamic."""
    sizes = value(node).shape[:-1]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def same_sizes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether shapes are equal whatever the value of dynamic sizes."""
    return len(one) == len(other) and statically_known_true(sym_eq(tuple(one), tuple(other)))


def alike(*nodes: Node) -> bool:
    """Whether results have one dtype, and one shape whatever the value of dynamic sizes."""
    first, *others = map(value, nodes)
    return all(one.dtype == first.dtype and same_sizes(one.shape, first.shape) for one in others)


def has_hopper(device: torch.device | None = None) -> bool:
    """Whether a GPU, the current one by default, has compute capability 9.0 or higher."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (9, 0)


def on_gpu(node: Node) -> bool:
    """Whether a result is on a GPU of NVIDIA's."""
    return value(node).device.type == "cuda"


def on_hopper(node: Node) -> bool:
    """Whether a result is on such a GPU, for which the kernels of few tokens are."""
    return on_gpu(node) and has_hopper(value(node).device)


def call(graph: Graph, like: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """A new node at the insertion point of ``graph``, with its fake value, and the origin of ``like``."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {key: like.meta[key] for key in _ORIGIN if key in like.meta}
    values, keywords = torch.fx.map_arg((args, kwargs), value)
    with detect_fake_mode(torch.utils._pytree.tree_leaves((values, keywords))) or nullcontext():
        node.meta["val"] = target(*values, **keywords)
    return node


def inserting_behind(graph: Graph, node: Node) -> Any:
    """The insertion point behind ``node``, and behind all inputs of the graph if it is one."""
    while node.next.op in ("placeholder", "get_attr"):
        node = node.next
    return graph.inserting_before(node.next)


def replace_behind(old: Node | None, new: Node) -> None:
    """Make the users of ``old`` behind ``new`` read ``new``. Users in front of it keep ``old``."""
    if old is not None:
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user > new)


def strip(node: Any, *targets: Any) -> Any:
    """The operand under calls of unary operators ``targets``."""
    while is_call(node, *targets):
        node = node.args[0]
    return node
