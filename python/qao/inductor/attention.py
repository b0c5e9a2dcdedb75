"""Pass: attention of a few tokens over a key-value cache becomes ``qao::decode_attention``.

ATen's attention reads keys and values with one head per query head. Models with grouped queries therefore repeat both
in front of it, which copies the whole cache for every token. The operator reads the cache as it is, and on a GPU only
up to the last key that counts.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ops.library import build_info
from .nodes import arguments, aten, call, is_call, strip, value
from .report import Report

MOST_QUERIES = 16  # tokens of a call up to which the operator is faster: decoding, and checks of drafted tokens
MASKS = {  # ATen's attention on a CPU and on a GPU, and its argument of the mask
    aten._scaled_dot_product_flash_attention_for_cpu.default: "attn_mask",
    aten._scaled_dot_product_cudnn_attention.default: "attn_bias",
    aten._scaled_dot_product_efficient_attention.default: "attn_bias",
    aten._scaled_dot_product_flash_attention.default: "",  # takes none
}
_EXCLUDED = -math.inf, -65536.0  # what ATen makes of False; the second for cuDNN
_VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def replace_attention(graph: Graph, report: Report) -> None:
    """Replace the attention of few tokens in ``graph``, in place."""
    for node in list(graph.nodes):
        if not is_call(node, *MASKS):
            continue
        given = arguments(node)
        why = _unsuitable(node, given)
        if why is not None:
            report.leave(f"attention: {why}", node)
            continue
        query, key, other = given["query"], ungrouped(given["key"]), ungrouped(given["value"])
        # The operator broadcasts the mask, and reads one that heads share once.
        mask = plain_mask(given.get(MASKS[node.target]))
        scale = scale_of(given)
        with graph.inserting_before(node):
            y = call(graph, node, torch.ops.qao.decode_attention.default, query, key, other, mask, scale)
            y = call(graph, node, aten.permute.default, y, [0, 2, 1, 3])
        put(graph, node, y)
        report.replace("decode_attention", node)


def plain_mask(node: Any) -> Any:
    """A mask before ATen expanded it, and before it turned booleans to numbers."""
    node = strip(node, aten.expand.default)
    if is_call(node, aten.where.self):
        given = arguments(node)
        if _constant(given["self"]) == 0 and _constant(given["other"]) in _EXCLUDED:
            return strip(given["condition"], aten.expand.default)
    return node


def scale_of(given: dict[str, Any]) -> float:
    return float(given["scale"] if given["scale"] is not None else value(given["query"]).shape[-1] ** -0.5)


def _constant(node: Any) -> float | None:
    """The number that fills a tensor."""
    if is_call(node, aten.full.default):
        return arguments(node)["fill_value"]  # type: ignore[no-any-return]
    return arguments(node)["s"] if is_call(node, aten.scalar_tensor.default) else None


def _unsuitable(node: Node, given: dict[str, Any]) -> str | None:
    """Why this attention stays."""
    tokens = value(given["query"]).shape[2]
    if not isinstance(tokens, int):
        return "the number of tokens is dynamic; a call with one token has a graph to itself"
    if not isinstance(value(given["query"]).shape[3], int):
        return "the size of a head is dynamic"
    if tokens > MOST_QUERIES:
        return f"more than {MOST_QUERIES} tokens, for which ATen's kernel is faster"
    if given["is_causal"]:
        return "a causal mask without a tensor"
    if why := unfit(node, given):
        return why
    return _unsuitable_on_a_gpu(given) if value(given["query"]).device.type != "cpu" else None


def unfit(node: Node, given: dict[str, Any]) -> str | None:
    """Why no other kernel can take the place of this attention."""
    if given["dropout_p"]:
        return "dropout"
    if any(not is_call(user, operator.getitem) or (user.args[1] != 0 and user.users) for user in node.users):
        return "its log-sum-exp is used"
    if ungrouped(given["key"]) is not given["key"] and groups(given["key"]) != groups(given["value"]):
        return "keys and values are repeated differently"
    return None


def put(graph: Graph, node: Node, y: Node) -> None:
    """Make the users of attention read ``y``, and erase it."""
    for user in list(node.users):
        user.replace_all_uses_with(y)
        graph.erase_node(user)
    graph.erase_node(node)


def _unsuitable_on_a_gpu(given: dict[str, Any]) -> str | None:
    """Why this attention on a GPU stays."""
    query, sizes = value(given["query"]), (value(given["query"]).shape[3], value(given["value"]).shape[3])
    if not build_info()["cuda"]:
        return "this build of qao has no CUDA kernels"
    if torch.cuda.get_device_capability(query.device)[0] != 9:
        return "the kernel is made for Hopper GPUs"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"{str(query.dtype).removeprefix('torch.')} on a GPU"
    if any(size % 8 or size > 256 for size in sizes):
        return "on a GPU, heads of more than 256 elements or of no multiple of 8"
    return None


def ungrouped(node: Node) -> Node:
    """Keys or values [B, heads, S, D] before they were repeated for the query heads of a group."""
    expanded = _expanded(node)
    return node if expanded is None else expanded.args[0].args[0]  # type: ignore[union-attr, return-value]


def groups(node: Node) -> int:
    expanded = _expanded(node)
    return 1 if expanded is None else value(expanded).shape[2]


def _expanded(node: Node) -> Node | None:
    """The node that expands [B, kv heads, 1, S, D] to [B, kv heads, group, S, D], below a view of four dimensions."""
    expanded = strip(node, *_VIEWS, aten.clone.default)
    if not is_call(expanded, aten.expand.default) or value(node).dim() != 4 or value(expanded).dim() != 5:
        return None
    single = expanded.args[0]
    if not is_call(single, aten.unsqueeze.default) or single.args[1] != 2:
        return None
    batch, kv_heads, group, length, size = value(expanded).shape
    repeated = value(node).shape == (batch, kv_heads * group, length, size)
    return expanded if repeated and value(single.args[0]).shape == (batch, kv_heads, length, size) else None
