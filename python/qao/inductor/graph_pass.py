"""The graph pass that Inductor calls: it runs the passes of this package in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from . import report
from .argmax import split_argmax
from .attention import replace_attention
from .counters import join_counters
from .norms import fuse_norms
from .outer import multiply_outer_products
from .products import merge_products
from .prompt_attention import replace_prompt_attention
from .quantizers import fuse_quantization
from .token_attention import fuse_token_attention

_PASSES = (
    replace_prompt_attention,
    replace_attention,
    fuse_token_attention,
    fuse_quantization,
    merge_products,
    fuse_norms,
    split_argmax,
    join_counters,
    multiply_outer_products,
)
SOURCES = tuple(str(path) for path in sorted(Path(__file__).parent.glob("*.py")))


class GraphPass(CustomGraphPass):
    """All passes over one graph of ATen operators, which has no in-place operators."""

    def __call__(self, graph: Graph) -> None:
        # AOTAutograd names the inputs of the graphs of training primals and tangents. They stay as they are.
        if any(node.name.startswith(("primals_", "tangents_")) for node in graph.find_nodes(op="placeholder")):
            return
        for replace in _PASSES:
            replace(graph, report.current())
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """The part of Inductor's cache key that stands for these passes."""
        return get_hash_for_files(SOURCES)
