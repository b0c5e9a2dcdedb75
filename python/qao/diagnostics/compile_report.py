"""What torch.compile does with a model and its inputs: graphs, breaks, recompilations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .._words import counted

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


@dataclass
class Compilation:
    """What torch.compile did, over all the calls."""

    graphs: int = 0
    breaks: list[str] = field(default_factory=list)  # reason and place, one a place
    recompiles: list[str] = field(default_factory=list)  # the guard that failed, one a recompilation
    graph_inputs: list[int] = field(default_factory=list)  # tensors and sizes that go into each graph
    seconds: float = 0.0
    error: str | None = None  # of a compilation, or of a call, that failed

    def describe(self) -> Iterator[str]:
        """Lines of a report."""
        inputs = ", ".join(str(count) for count in self.graph_inputs)
        yield f"torch.compile: {counted(self.graphs, 'graph')} in {self.seconds:.1f} s; inputs: {inputs or 'none'}"
        yield from (f"graph break: {text}" for text in self.breaks)
        yield from (f"recompiled: {_first_line(text)}" for text in self.recompiles)
        if self.error is not None:
            yield f"failed: {self.error}"

    def advice(self) -> Iterator[str]:
        """What to do, most important first."""
        if self.error is not None:
            yield (
                "torch.compile failed. Try backend='eager', then 'aot_eager', then 'inductor' to learn which stage "
                "does; docs/compile.md has the steps."
            )
        if self.breaks:
            yield (
                f"{counted(len(self.breaks), 'graph break')}: each costs host time in every call. Change the code at "
                "the places above, and compile with fullgraph=True, which makes a break an error. qao's layers break "
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
                "Recompiled since some inputs were made under torch.inference_mode and some were not: make all of "
                "them in the same mode."
            )
        if others:
            count = counted(len(others), "recompilation")
            yield f"{count} for other reasons: make constant what the guards above name."


def compiled(model: nn.Module, calls: list[Call], options: dict[str, Any]) -> Compilation:
    """What torch.compile does with these calls of ``model``, one after the other. ``options`` are its arguments."""
    from torch._dynamo import utils

    result = Compilation()
    _forget_compilations()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    function = torch.compile(model, **options)
    try:
        for arguments, keywords in calls:
            function(*arguments, **keywords)
    except Exception as error:  # a failed compilation is a result here: what it says goes into the report
        result.error = f"{type(error).__name__}: {error}"
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
    """``torch._dynamo.reset``. The first one in a process may import what registers a backend, which ends its loop over
    those that there are (torch 2.13)."""
    try:
        torch._dynamo.reset()
    except RuntimeError:
        torch._dynamo.reset()


def _breaks(model: nn.Module, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Every break with its place, which the counters do not know."""
    try:
        found = torch._dynamo.explain(model)(*arguments, **kwargs).break_reasons
    except Exception:  # what cannot be traced again was reported by the compilation
        return []
    texts = []
    for reason in found:
        place = reason.user_stack[-1] if reason.user_stack else None
        at = f" at {place.filename}:{place.lineno} ({place.line})" if place else ""
        texts.append(_first_line(reason.reason) + at)
    return list(dict.fromkeys(texts))


def _by_cause(recompiles: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Recompilations for a size or stride, for a tensor of another mode, and for anything else."""
    # The first time by comparison of tensors, then by conditions such as "args[0].stride()[0] == args[0].size()[1]".
    sizes = [text for text in recompiles if re.search(r"(size|stride) mismatch|\.(size|stride)\(\)", text)]
    modes = [text for text in recompiles if "dispatch key set mismatch" in text]
    return sizes, modes, [text for text in recompiles if text not in sizes and text not in modes]


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()
