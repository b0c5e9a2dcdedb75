"""Record of what the graph passes replaced, and of places that they left, for ``qao.explain``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Report:
    """Places by result, in the order of the graph. A place is a module's name, or the node's without one."""

    replaced: dict[str, list[str]] = field(default_factory=dict)  # by the operator that took the place
    left: dict[str, list[str]] = field(default_factory=dict)  # by the reason

    def replace(self, what: str, *nodes: torch.fx.Node) -> None:
        """Note that ``what`` took the place of these nodes."""
        self.replaced.setdefault(what, []).append(_joined([*dict.fromkeys(map(place, nodes))]))

    def leave(self, why: str, node: torch.fx.Node) -> None:
        """Note why a node stays that a pass is made for."""
        self.left.setdefault(why, []).append(place(node))


def place(node: torch.fx.Node) -> str:
    """Name of the innermost module that made ``node``: "model.layers.0.self_attn"."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    name = str(stack[-1][0]) if stack else ""
    # Dynamo names modules as it found them: L['self'].layers.0, L['args'][0]._modules['layers']._modules['0']
    name = re.sub(r"\._modules\['([^']*)'\]|\.__getattr__\('([^']*)'\)|\[(\d+)\]", r".\1\2\3", name.partition("]")[2])
    name = re.sub(r"^(\.0)?\.|^\.0$", "", name.replace("._orig_mod", ""))
    return name or node.name


def _joined(places: list[str]) -> str:
    """One name for several modules: "layers.0.mlp.(gate, up)"."""
    parents = {name.rpartition(".")[0] for name in places}
    if len(places) == 1 or len(parents) > 1:
        return ", ".join(places)
    names = ", ".join(name.rpartition(".")[2] for name in places)
    return ".".join(filter(None, (*parents, f"({names})")))


_open: list[Report] = []


def current() -> Report:
    """The report of the innermost ``collected()``, or one that is dropped."""
    return _open[-1] if _open else Report()


@contextmanager
def collected() -> Iterator[Report]:
    """A report of the graphs that are compiled in this context. Graphs from Inductor's cache are not in it."""
    report = Report()
    _open.append(report)
    try:
        yield report
    finally:
        _open.remove(report)
