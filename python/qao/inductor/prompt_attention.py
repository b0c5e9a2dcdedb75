"""Pass: attention of a prompt over a static cache gets a causal kernel in place of a mask.

A static cache has more keys than a prompt has used, so transformers passes a mask. With a mask, ATen multiplies all
queries with all keys of the cache, and models with grouped queries repeat both keys and values. Without padding the
mask is causal, from the cache's counter of tokens on. FlashAttention reads that counter on the device, and only keys
that count.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from .attention import MASKS, MOST_QUERIES, plain_mask, put, scale_of, unfit, ungrouped
from .masks import Causal, causal
from .nodes import arguments, aten, call, is_call, on_gpu, value
from .report import Report

_FLASH: Any = aten._flash_attention_forward.default
_prims: Any = torch.ops.prims
_Lengths = tuple[Node, Node, Node]  # begins of queries and of keys [B + 1], and keys that count [B], in int32


def replace_prompt_attention(graph: Graph, report: Report) -> None:
    """Replace attention of many tokens with a causal mask in ``graph``, in place."""
    known: dict[tuple[Any, ...], _Lengths] = {}
    for node in list(graph.nodes):
        if not is_call(node, *MASKS):
            continue
        given = arguments(node)
        if given["is_causal"] or unfit(node, given) or not applies(given):
            continue
        mask = causal(plain_mask(given.get(MASKS[node.target])))
        if mask is None:
            continue
        with graph.inserting_before(node):
            _replace(graph, node, given, mask, known)
        report.replace("causal attention of a prompt", node)


def applies(given: dict[str, Any]) -> bool:
    """Whether FlashAttention takes these heads."""
    query, key = value(given["query"]), value(given["key"])
    sizes = *query.shape, *key.shape
    if not on_gpu(given["query"]) or not all(isinstance(size, int) for size in sizes):
        return False
    capable = torch.cuda.get_device_capability(query.device) >= (8, 0) and torch.backends.cuda.flash_sdp_enabled()
    head = query.shape[3], key.shape[3], value(given["value"]).shape[3]
    fits = len(set(head)) == 1 and head[0] % 8 == 0 and head[0] <= 256 and query.shape[2] > MOST_QUERIES
    return capable and fits and query.dtype in (torch.bfloat16, torch.float16)


def _replace(graph: Graph, node: Node, given: dict[str, Any], mask: Causal, known: dict[Any, _Lengths]) -> None:
    query = given["query"]
    batch, _, tokens, _ = value(query).shape
    keys = value(given["key"]).shape[2]
    sizes = batch, tokens, keys, value(query).device
    if (mask[:2], sizes) not in known:
        known[mask[:2], sizes] = _lengths(graph, node, mask, *sizes)
    begins, begins_of_keys, used = known[mask[:2], sizes]
    operands = (_packed(graph, node, x) for x in (query, ungrouped(given["key"]), ungrouped(given["value"])))
    options = {"scale": scale_of(given), "seqused_k": used}
    if mask.window is not None:
        options |= {"window_size_left": mask.window - 1, "window_size_right": 0}
    flash = call(graph, node, _FLASH, *operands, begins, begins_of_keys, tokens, keys, 0.0, True, False, **options)
    y = call(graph, node, operator.getitem, flash, 0)
    y = call(graph, node, aten.view.default, y, [batch, tokens, *value(y).shape[1:]])
    put(graph, node, call(graph, node, aten.permute.default, y, [0, 2, 1, 3]))


def _lengths(
    graph: Graph, like: Node, mask: Causal, batch: int, tokens: int, keys: int, device: torch.device
) -> _Lengths:
    def begins(step: int) -> Node:
        options = {"start": 0, "step": step, "dtype": torch.int32, "device": device, "requires_grad": False}
        return call(graph, like, _prims.iota.default, batch + 1, **options)

    last = mask.shift + tokens  # the number of keys that the last query sees, from the start
    if mask.start is None:
        used = call(graph, like, aten.full.default, [batch], min(last, keys), dtype=torch.int32, device=device)
    else:
        used = call(graph, like, aten.add.Tensor, mask.start, last)
        used = call(graph, like, aten.clamp_max.default, used, keys)
        used = call(graph, like, _prims.convert_element_type.default, used, torch.int32)
        used = call(graph, like, aten.view.default, used, [1])
        used = call(graph, like, aten.expand.default, used, [batch])
        used = call(graph, like, aten.clone.default, used, memory_format=torch.contiguous_format)
    return begins(tokens), begins(keys), used


def _packed(graph: Graph, like: Node, x: Node) -> Node:
    """Heads x [B, H, T, D] as [B T, H, D]; a view for one sequence."""
    batch, heads, tokens, size = value(x).shape
    x = call(graph, like, aten.permute.default, x, [0, 2, 1, 3])
    if batch == 1:
        return call(graph, like, aten.select.int, x, 0, 0)
    x = call(graph, like, aten.clone.default, x, memory_format=torch.contiguous_format)
    return call(graph, like, aten.view.default, x, [batch * tokens, heads, size])
