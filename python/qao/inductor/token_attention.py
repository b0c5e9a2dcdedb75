"""Pass: rotary embedding, the write to a static cache and attention of one token become one operator.

The operator gets the mask and the range of keys that it counts, which one small kernel finds for all layers.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .nodes import alike, arguments, aten, call, inserting_behind, is_call, on_hopper, same_sizes, value
from .report import Report

_qao: Any = torch.ops.qao
_ATTENTION = _qao.decode_attention.default
_TOKEN = _qao._token_attention.default
_SIZES = 64, 128  # of a head
_MOST_GROUP = 8  # query heads of a key-value head


def fuse_token_attention(graph: Graph, report: Report) -> None:
    """Replace attention of one token in ``graph``, in place."""
    graph.eliminate_dead_code()  # other readers of a cache that no longer count
    ranges: dict[Node, Node] = {}
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        given = arguments(node)
        keys, values = _update(given["k"], node), _update(given["v"], node)
        mask = given["mask"]
        if keys is None or values is None or keys.position is not values.position or not applies(given["q"], keys.new):
            continue
        if mask is not None and not _is_shared(mask, value(keys.cache)):
            report.leave("cache and attention of one token: heads have different masks", node)
            continue
        if mask is not None and mask not in ranges:
            with inserting_behind(graph, mask):
                ranges[mask] = call(graph, mask, _qao._key_range.default, mask)
        q, k, cos, sin = _before_rotation(given["q"], keys.new)
        operands = {
            "q": q,
            "k": k,
            "v": values.new,
            "cos": cos,
            "sin": sin,
            "position": keys.position,
            "mask": mask,
            "key_range": None if mask is None else ranges[mask],
            "scale": given["scale"],
        }
        _replace(graph, node, keys, values, operands)
        rotary = "" if cos is None else "rotary embedding, "
        report.replace(f"one operator of {rotary}cache and attention of one token", node)


def applies(q: Node, k: Node) -> bool:
    """Whether a kernel takes these heads."""
    _, *sizes = value(q).shape
    if not all(isinstance(each, int) for each in (*sizes, value(k).shape[1])):
        return False
    heads, queries, size = sizes
    fits = queries == 1 and size in _SIZES and heads <= _MOST_GROUP * value(k).shape[1]
    return fits and on_hopper(q) and value(q).dtype in (torch.bfloat16, torch.float16)


def _is_shared(mask: Node, cache: Tensor) -> bool:
    """Whether a mask [B or 1, 1, 1, keys] serves all heads."""
    return any(same_sizes(value(mask).shape, (batch, 1, 1, cache.shape[2])) for batch in (1, cache.shape[0]))


class _Update(NamedTuple):
    """A write of one token to a cache that is an input of the graph."""

    node: Node
    cache: Node
    position: Node
    new: Node  # [B, kv heads, 1, D]
    copy: Node  # writes the result back to the input


def _update(node: Node, reader: Node) -> _Update | None:
    """The write behind keys or values that only attention reads."""
    if not is_call(node, aten.index_put.default):
        return None
    given = arguments(node)
    cache, indices, new = given["self"], given["indices"], given["values"]
    if len(indices) != 3 or indices[0] is not None or indices[1] is not None or given["accumulate"]:
        return None
    position = indices[2]
    copies = [user for user in node.users if is_call(user, aten.copy_.default) and user.args == (cache, node)]
    if cache.op != "placeholder" or len(copies) != 1 or set(node.users) != {reader, *copies}:
        return None
    if set(cache.users) != {node, *copies} or value(position).dtype != torch.int64:
        return None
    batch, heads, _, size = value(cache).shape
    fits = same_sizes(value(position).shape, (1,)) and same_sizes(value(new).shape, (batch, heads, 1, size))
    return _Update(node, cache, position, new, copies[0]) if fits and value(cache).stride(3) == 1 else None


def _before_rotation(q: Node, k: Node) -> tuple[Node, Node, Node | None, Node | None]:
    """q and k before both were rotated by the same angles, and these; or q and k as they are."""
    of_q, of_k = _rotation(q), _rotation(k)
    if of_q is None or of_k is None or of_q[1:] != of_k[1:]:
        return q, k, None, None
    return of_q[0], of_k[0], *of_q[1:]


def _rotation(node: Node) -> tuple[Node, Node, Node] | None:
    """x, cos and sin of ``x * cos + cat(-x[half:], x[:half]) * sin``, which transformers calls apply_rotary_pos_emb."""
    if not is_call(node, aten.add.Tensor) or not all(is_call(term, aten.mul.Tensor) for term in node.args[:2]):
        return None
    for first, second in (node.args[:2], node.args[1::-1]):
        for turned, sin in (second.args[:2], second.args[1::-1]):  # type: ignore[union-attr]
            x = _turned(turned)
            for other, cos in (first.args[:2], first.args[1::-1]):  # type: ignore[union-attr]
                if x is not None and other is x and _is_angle(cos, x) and _is_angle(sin, x):
                    return x, cos, sin  # type: ignore[return-value]
    return None


def _is_angle(node: Any, x: Node) -> bool:
    if not isinstance(node, Node):
        return False
    batch, *_, size = value(x).shape
    fits = any(same_sizes(value(node).shape, (each, 1, 1, size)) for each in (1, batch))
    return fits and value(node).dtype == value(x).dtype


def _turned(node: Any) -> Node | None:
    """x of ``cat(-x[half:], x[:half])`` along the last dimension."""
    if not is_call(node, aten.cat.default) or value(node).dim() != 4:
        return None
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    if dim not in (-1, 3) or len(parts) != 2 or not is_call(parts[0], aten.neg.default):
        return None
    high, low = parts[0].args[0], parts[1]
    if not is_call(high, aten.slice.Tensor) or not is_call(low, aten.slice.Tensor):
        return None
    half = value(node).shape[3] // 2
    of_high, of_low = arguments(high), arguments(low)
    x = of_low["self"]
    if not alike(x, node) or of_high["self"] is not x or {of_high["dim"], of_low["dim"]} - {-1, 3}:
        return None
    fits = of_high["start"] == half and (of_low["start"] or 0) == 0 and of_low["end"] == half
    return x if fits and value(high).shape[3] == half and of_high["step"] == of_low["step"] == 1 else None


def _replace(graph: Graph, node: Node, keys: _Update, values: _Update, operands: dict[str, Any]) -> None:
    """Put the operator in place of ``node``. Inductor makes its functional form write to the caches."""
    functional = torch.ops.higher_order.auto_functionalized_v2
    caches = [keys.cache, values.cache]
    bases: dict[str, Any] = {"_key_cache_base_index": 0, "_value_cache_base_index": 1, "_all_bases": caches}
    with graph.inserting_before(node):
        fused = graph.call_function(functional, (_TOKEN,), {**operands, **bases})
        fused.meta = {**node.meta, "val": (value(node), *map(value, caches))}
        y, *written = (call(graph, node, operator.getitem, fused, i) for i in range(3))
    node.replace_all_uses_with(y)
    graph.erase_node(node)
    for update, new in zip((keys, values), written, strict=True):
        update.node.replace_all_uses_with(new)
        graph.erase_node(update.node)
