"""Pass: products with an inner dimension of 1 become multiplications, which Inductor joins with their neighbors.

Rotary embeddings multiply frequencies and positions this way. cuBLAS takes 3 us, and no kernel overlaps with it.
"""

from __future__ import annotations

from torch.fx import Graph

from .nodes import aten, call, on_gpu, value
from .report import Report


def multiply_outer_products(graph: Graph, report: Report) -> None:
    """Replace outer products in ``graph``, in place."""
    for target in (aten.mm.default, aten.bmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            a, b = node.args
            if value(a).shape[-1] != 1 or not on_gpu(node):
                continue
            with graph.inserting_before(node):
                y = call(graph, node, aten.mul.Tensor, a, b)
            node.replace_all_uses_with(y)
            graph.erase_node(node)
            report.replace("multiplication of an outer product", node)
