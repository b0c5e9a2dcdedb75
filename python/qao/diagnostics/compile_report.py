"""Report of what torch.compile does with a model: graphs, graph breaks, recompilations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .._words import counted
from ..inductor import report as passes
from ..quantization.report import common_name

_LINES, _COLUMNS = 10, 400  # shown of an error

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


@dataclass
class Compilation:
    """Results of torch.compile over all calls."""

    graphs: int = 0
    breaks: list[str] = field(default_factory=list)  # reason and location, one entry per location
    recompiles: list[str] = field(default_factory=list)  # the failed guard, one entry per recompilation
    graph_inputs: list[int] = field(default_factory=list)  # number of tensors and sizes that enter each graph
    replaced: dict[str, list[str]] = field(default_factory=dict)  # modules that a graph pass replaced, by its operator
    left: dict[str, list[str]] = field(default_factory=dict)  # modules that a graph pass left, by the reason
    seconds: float = 0.0
    error: str | None = None  # error of a failed compilation or call

    def describe(self) -> Iterator[str]:
        """Lines of the report."""
        inputs = ", ".join(str(count) for count in self.graph_inputs)
        yield f"torch.compile: {counted(self.graphs, 'graph')} in {self.seconds:.1f} s; inputs: {inputs or 'none'}"
        yield from (f"graph pass: {what}: {_counted(places)}" for what, places in self.replaced.items())
        yield from (f"no graph pass: {why}: {_counted(places)}" for why, places in self.left.items())
        yield from (f"graph break: {text}" for text in self.breaks)
        yield from (f"recompiled: {_first_line(text)}" for text in self.recompiles)
        if self.error is not None:
            yield from _shortened(f"failed: {self.error}")

    def advice(self) -> Iterator[str]:
        """Recommendations, most important first."""
        if self.error is not None:
            yield (
                "torch.compile failed. Try backend='eager', then 'aot_eager', then 'inductor' to learn which stage "
                "does; docs/compile.md has the steps."
            )
        if self.breaks:
            yield (
                f"{counted(len(self.breaks), 'graph break')}: each costs host time in every call. Change the code at "
                "the places above, and compile with fullgraph=True, which makes a break an error. qao's layers cause "
                "no graph."
            )
        sizes, modes, others = _by_cause(self.recompiles)
        if sizes:
            yield (
                "Recompiled for another size. If it keeps changing, compile with dynamic=True, or call "
                "torch._dynamo.mark_dynamic(x, dimension) before the first call; sizes 0 and 1 always get a graph each."
            )
        if modes:
            yield (
                "Recompiled because some inputs were made under torch.inference_mode and some were not: make all of "
                "them in the same mode."
            )
        if others:
            count = counted(len(others), "recompilation")
            yield f"{count} for other reasons: keep the values that the guards above name constant."


def compiled(model: nn.Module, calls: list[Call], options: dict[str, Any]) -> Compilation:
    """Compile ``model``, run these calls in order and report. ``options`` are torch.compile's arguments."""
    from torch._dynamo import utils

    result = Compilation()
    _forget_compilations()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    function = torch.compile(model, **{"backend": "qao", **options})
    try:
        # A graph from a cache has been through the passes before.
        with passes.collected() as report, torch.compiler.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
            for arguments, keywords in calls:
                function(*arguments, **keywords)
    except Exception as error:  # a failed compilation is a result: report its message
        result.error = f"{type(error).__name__}: {error}"
    result.replaced, result.left = report.replaced, report.left
    frames = utils.get_compilation_metrics()
    result.graphs = utils.counters["stats"]["unique_graphs"]
    result.graph_inputs = [frame.graph_input_count or 0 for frame in frames if frame.graph_op_count]
    result.recompiles = [frame.recompile_reason for frame in frames if frame.recompile_reason]
    result.seconds = sum(frame.entire_frame_compile_time_s or 0.0 for frame in frames)
    if utils.counters["graph_break"]:
        result.breaks = _breaks(model, *calls[0]) or list(utils.counters["graph_break"])
    _forget_compilations()
    return result


def _forget_compilations() -> None:
    """``torch._dynamo.reset``, repeated after a failure.

    The first reset in a process may import a module that registers a backend, which breaks its loop over backends
    (torch 2.13).
    """
    try:
        torch._dynamo.reset()
    except RuntimeError:
        torch._dynamo.reset()


def _breaks(model: nn.Module, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Every graph break with its location, which the counters lack."""
    try:
        found = torch._dynamo.explain(model)(*arguments, **kwargs).break_reasons
    except Exception:  # the compilation has already reported an untraceable call
        return []
    texts = []
    for reason in found:
        place = reason.user_stack[-1] if reason.user_stack else None
        at = f" at {place.filename}:{place.lineno} ({place.line})" if place else ""
        texts.append(_first_line(reason.reason) + at)
    return list(dict.fromkeys(texts))


def _by_cause(recompiles: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Recompilations caused by a size or stride, by a tensor of another mode, and by anything else."""
    # The first recompilation compares tensors, later ones conditions such as "args[0].stride()[0] ==
    # args[0].size()[1]".
    sizes = [text for text in recompiles if re.search(r"(size|stride) mismatch|\.(size|stride)\(\)", text)]
    modes = [text for text in recompiles if "dispatch key set mismatch" in text]
    return sizes, modes, [text for text in recompiles if text not in sizes and text not in modes]


def _shortened(text: str) -> Iterator[str]:
    """The first lines of an error. A C++ compiler's holds thousands, most of them warnings."""
    lines = text.splitlines()
    for line in lines[:_LINES]:
        yield line if len(line) <= _COLUMNS else f"{line[:_COLUMNS]} …"
    if len(lines) > _LINES:
        yield f"… and {len(lines) - _LINES} more lines: explanation.compilation.error"


def _counted(places: list[str]) -> str:
    """Places that differ only in their numbers are one entry."""
    alike: dict[str, list[str]] = {}
    for place in places:
        alike.setdefault(re.sub(r"\d+", "#", place), []).append(place)
    return "; ".join(common_name(names) for names in alike.values())


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()
