"""Pass: argmax of a few rows over a vocabulary becomes argmax in chunks, and over the chunks.

Inductor reduces a row in one CTA: 30 us for 128,256 columns on an H200. Chunks are reduced by a CTA each.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from .nodes import arguments, aten, call, on_gpu, rows_of, value
from .report import Report

MOST_ROWS = 64  # up to which a CTA per row leaves most of a GPU idle
FEWEST_COLUMNS = 16384
_CHUNK = range(256, 2049)  # columns of a chunk
_DTYPES = torch.float32, torch.bfloat16, torch.float16


def split_argmax(graph: Graph, report: Report) -> None:
    """Replace argmax over many columns in ``graph``, in place."""
    for node in graph.find_nodes(op="call_function", target=aten.argmax.default):
        given = arguments(node)
        x = given["self"]
        if not _applies(x, given["dim"]):
            continue
        size = _chunk_size(value(x).shape[-1])
        if size is None:
            sizes = f"{_CHUNK.start} to {_CHUNK.stop - 1}"
            report.leave(f"argmax: no number of {sizes} divides {value(x).shape[-1]} columns", node)
            continue
        with graph.inserting_before(node):
            y = _in_chunks(graph, node, x, size)
            if not given["keepdim"]:
                y = call(graph, node, aten.squeeze.dim, y, -1)
        node.replace_all_uses_with(y)
        graph.erase_node(node)
        report.replace("argmax in two steps", node)


def _applies(x: Node, dim: int | None) -> bool:
    """Whether few rows are reduced over many columns, on a GPU."""
    shape, rows = value(x).shape, rows_of(x)
    if not shape or dim not in (-1, len(shape) - 1) or rows is None or not isinstance(shape[-1], int):
        return False
    fits = 1 <= rows <= MOST_ROWS and shape[-1] >= FEWEST_COLUMNS
    return fits and value(x).dtype in _DTYPES and on_gpu(x)


def _chunk_size(columns: int) -> int | None:
    """The smallest size that divides ``columns``, if possible a multiple of 8, for aligned loads of 16 bytes."""
    sizes = [size for size in _CHUNK if columns % size == 0]
    return min(sizes, key=lambda size: (size % 8 > 0, size), default=None)


def _in_chunks(graph: Graph, node: Node, x: Node, size: int) -> Node:
    """Argmax of ``x`` [..., N], with the last dimension kept.

    Both steps take the first of equal values, and NaN as the largest value, so that the result is that of one step. To
    split a dimension is a view with any strides.
    """
    *rows, columns = value(x).shape
    chunks = call(graph, node, aten.reshape.default, x, [*rows, columns // size, size])
    found = call(graph, node, aten.max.dim, chunks, -1)
    values, indices = (call(graph, node, operator.getitem, found, index) for index in range(2))
    chunk = call(graph, node, aten.argmax.default, values, -1, True)
    index = call(graph, node, aten.gather.default, indices, -1, chunk)
    start = call(graph, node, aten.mul.Tensor, chunk, size)
    return call(graph, node, aten.add.Tensor, index, start)
