"""Pass: RMSNorm with a residual, int4 products of the result, and a SiLU gate become one operator.

Up to 8 tokens on Hopper the operator is one kernel, in which every CTA makes the norm while its first weights arrive.
For more tokens it runs the kernels of its parts, which start while the one before ends.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ..ops.merged_mm import FUSED, MERGED
from .nodes import arguments, aten, call, inserting_behind, is_call, on_hopper, replace_behind, rows_of, value
from .patterns import FindNorm, Norm, rms_norm, silu_gate
from .report import Report

MOST_TOKENS = 128  # up to which kernels of qao, one behind the other, are faster than with one of Triton between
_PRODUCT = torch.ops.qao.int4_mm.default


def fuse_norms(graph: Graph, report: Report, find_norm: FindNorm = rms_norm) -> None:
    """Replace norms in front of int4 products in ``graph``, in place."""
    for node in [*graph.nodes]:
        if node.op != "call_function" or node.target not in (_PRODUCT, MERGED[_PRODUCT]):
            continue
        given = arguments(node)
        x = given["x"]
        if not applies(x) or given.get("batch_invariant"):
            continue
        norm = find_norm(x) if set(x.users) == {node} else None
        if norm is not None:
            lists = {name: _list(node, given, name) for name in ("weight", "scales", "bias", "out_features")}
            _replace(graph, report, node, norm, lists, given)


def applies(x: Node) -> bool:
    """Whether few tokens, or a number of them that is unknown yet, are multiplied on a GPU with the kernels."""
    rows = rows_of(x)
    return takes(x) and (rows is None or 1 <= rows <= MOST_TOKENS)


def takes(x: Node) -> bool:
    """Whether the kernels of int4 on Hopper that take several weights take this x."""
    return on_hopper(x) and value(x).dtype == torch.bfloat16


def _list(node: Node, given: dict[str, Any], name: str) -> list[Any]:
    """The argument of all weights; an operator of one weight has no list. Sizes that are not given are left out."""
    if node.target is not _PRODUCT:
        return list(given[name])
    return [] if name == "out_features" and not given[name] else [given[name]]


def _replace(
    graph: Graph, report: Report, node: Node, norm: Norm, lists: dict[str, Any], given: dict[str, Any]
) -> None:
    operands = [*norm.weights, *lists["weight"], *lists["scales"], *filter(None, lists["bias"])]
    start = max(norm.last, *operands)  # in the order of the graph
    single = node.target is _PRODUCT
    products = [node] if single else _results(node)
    gate = _gate(_halves(node) if single else products)
    if gate is not None and gate.up_first:
        gate = None if single else gate
        lists = {name: items[::-1] for name, items in lists.items()}
    target = FUSED
    if single:  # the weight may be that of gate and up
        target = torch.ops.qao.add_rms_norm_int4_mm.default
        lists = {name: items[0] if items else 0 for name, items in lists.items()}
    with inserting_behind(graph, start):
        fused = call(
            graph, node, target, norm.x, norm.residual, norm.weight, lists["weight"], lists["scales"], lists["bias"],
            norm.eps, lists["out_features"], given["in_features"], given["group_size"], gate is not None,
        )  # fmt: skip
        *ys, total = (call(graph, node, operator.getitem, fused, i) for i in range(len(value(fused))))
    for old, new in zip(products if gate is None else [gate.y], ys, strict=True):
        if old is not None:
            old.replace_all_uses_with(new)
    replace_behind(norm.total, total)
    count = "1 product" if single else f"{len(products)} products"
    parts = ["RMSNorm", count, *(["SiLU gate"] if gate else [])]
    report.replace(f"one operator of {', '.join(parts)} (int4_mm)", node)


def _halves(node: Node) -> list[Any]:
    """The nodes that take the halves of the columns of a result, if they are its only users."""
    users, width, last = list(node.users), value(node).shape[-1], value(node).dim() - 1
    if len(users) == 1 and is_call(users[0], aten.split.Tensor):
        given = arguments(users[0])
        return _results(users[0]) if 2 * given["split_size"] == width and given["dim"] in (-1, last) else []
    if len(users) != 2 or not all(is_call(user, aten.slice.Tensor) for user in users):
        return []
    found = {}
    for user in users:
        given = arguments(user)
        if given["dim"] in (-1, last) and given["step"] == 1:
            found[given["start"] or 0, min(width, width if given["end"] is None else given["end"])] = user
    halves = (0, width // 2), (width // 2, width)
    return [found[half] for half in halves] if found.keys() == {*halves} and width % 2 == 0 else []


def _results(node: Node) -> list[Any]:
    """The nodes that take the results of an operator with several; None for one that is not used."""
    found: list[Any] = [None] * len(value(node))
    for user in node.users:
        found[user.args[1]] = user  # type: ignore[index]
    return found


class _Gate(NamedTuple):
    """SiLU(gate) * up of two products."""

    y: Node
    up_first: bool  # up is the first product


def _gate(products: list[Any]) -> _Gate | None:
    """The SiLU gate that is the only user of two products."""
    if len(products) != 2 or None in products or any(len(each.users) != 1 for each in products):
        return None
    for up in products:
        (y,) = up.users
        found = silu_gate(y)
        if found is not None and found.up is up and {found.gate, up} == {*products}:
            (silu,) = (each for each in y.args if each is not up)
            return _Gate(y, up is products[0]) if len(silu.users) == 1 else None
    return None
