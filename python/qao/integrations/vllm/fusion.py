"""qao's graph passes in the graphs that vLLM compiles.

vLLM fuses norms and gates only with its own quantization operators. These passes do it for those of qao: a norm or a
gate with the quantization of x, and with an int4 product, which is one kernel for few tokens. The number of tokens is
dynamic in vLLM's graphs, and the operators choose their kernels when they run.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
from typing import Any

import torch
from torch.fx import Graph, Node

from ...inductor import patterns
from ...inductor.graph_pass import SOURCES
from ...inductor.nodes import is_call
from ...inductor.norms import fuse_norms
from ...inductor.quantizers import fuse_quantization
from ...inductor.report import Report
from ..serving.interface import InterfaceError, function_of
from ..wrapping import wrap

SWITCH = "QAO_DISABLE_VLLM_FUSION"
_BACKENDS = "vllm.compilation.backends"


def register() -> None:
    """Make each ``VllmBackend`` run the passes if its graph has operators of qao. Idempotent."""
    backends: Any = sys.modules[_BACKENDS]
    function_of(backends.VllmBackend, "configure_post_pass", "self")
    function_of(backends.PostGradPassManager, "add", "pass_")
    if not hasattr(torch.ops.vllm_ir, "fused_add_rms_norm"):
        raise InterfaceError("torch.ops.vllm_ir.fused_add_rms_norm is missing")
    wrap(backends.VllmBackend, "configure_post_pass", _with_passes)


def _with_passes(own: Any) -> Any:
    def configure_post_pass(self: Any) -> None:
        own(self)
        off = os.environ.get(SWITCH, "") not in ("", "0")
        if not off and any(map(_is_ours, self.graph.graph.nodes)):
            self.pass_manager.add(_pass())

    return configure_post_pass


def _is_ours(node: Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith("qao.")


def _pass() -> Any:
    from torch._inductor.custom_graph_pass import get_hash_for_files

    base: Any = sys.modules[_BACKENDS].InductorPass

    class QaoFusionPass(base):  # type: ignore[misc]
        """All passes over one graph."""

        def __call__(self, graph: Graph) -> None:
            report = Report()
            run(graph, report)
            for what, places in report.replaced.items():
                logging.getLogger("vllm.qao").debug("qao: %d times %s", len(places), what)

        def uuid(self) -> Any:
            return get_hash_for_files((*SOURCES, __file__)).hex()

    return QaoFusionPass()


def run(graph: Graph, report: Report) -> None:
    """Replace norms and gates in ``graph``, in place."""
    fuse_quantization(graph, report, find_norm)
    fuse_norms(graph, report, find_norm)
    graph.eliminate_dead_code()


def find_norm(y: Node) -> patterns.Norm | None:
    """The norm that makes ``y``, an operator of vLLM's IR or of ATen."""
    ir: Any = torch.ops.vllm_ir
    made: Any = y.args[0] if is_call(y, operator.getitem) and y.args[1] == 0 else y
    residual = total = None
    if is_call(made, ir.fused_add_rms_norm.default):
        x, residual, *others = made.args
        total = next((user for user in made.users if user.args[1] == 1), None)
    elif is_call(made, ir.rms_norm.default):
        x, *others = made.args
    else:
        return patterns.rms_norm(y)
    weight, eps, *sizes = others
    if any(size is not None for size in sizes):  # the norm of a part of x
        return None
    return patterns.Norm(x, residual, weight, eps, total, made) if weight is None or patterns.suits(weight, x) else None
