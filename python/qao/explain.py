"""What a quantised model does with given inputs: the kernel of each layer and why, and what torch.compile does."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import survey
from .linear import QuantLinear
from .report import common_name, table
from .schemes import Int8WeightOnly
from .selection import selector

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


@dataclass
class LayerCall:
    """One QuantLinear, as the inputs reached it."""

    name: str
    shape: tuple[int, int]  # N, K
    scheme: str
    tokens: int  # M
    x_dtype: str
    calls: int  # with this M and dtype
    kernel: str | None  # None where that is not known
    why: str  # the plan, or what the choice was made from
    copied: bool  # x is copied before the kernel reads it, since its rows are not at a constant distance


@dataclass
class Compilation:
    """What torch.compile did, over all the calls."""

    graphs: int = 0
    breaks: list[str] = field(default_factory=list)  # reason and place, one a place
    recompiles: list[str] = field(default_factory=list)  # the guard that failed, one a recompilation
    graph_inputs: list[int] = field(default_factory=list)  # tensors and sizes that go into each graph
    seconds: float = 0.0
    error: str | None = None  # of a compilation, or of a call, that failed


@dataclass
class Explanation:
    """The result of ``explain``; print it, and put it into a bug report with the output of ``python -m qao doctor``."""

    layers: list[LayerCall]
    uncalled: list[str]  # QuantLinears that no call reached
    unquantized: dict[str, str]  # other linear layers, and why they are as they are
    compilation: Compilation | None  # None: not asked for

    @property
    def advice(self) -> list[str]:
        """What to do, most important first."""
        return list(_advice(self)) or ["Nothing: every layer has its kernel, and one compilation served every call."]

    def to_dict(self) -> dict[str, Any]:
        """Everything in types that JSON knows."""
        return asdict(self) | {"advice": self.advice}

    def __str__(self) -> str:
        header = ("layer", "shape", "scheme", "M", "x", "calls", "kernel", "why")
        alike: dict[tuple[str, ...], list[str]] = {}
        for call in self.layers:
            alike.setdefault((re.sub(r"\d+", "#", call.name), *_cells(call)), []).append(call.name)
        lines = table(header, [(common_name(names), *cells) for (_, *cells), names in alike.items()])
        lines += [f"{name}: not called" for name in self.uncalled]
        lines += [f"{name}: not quantised, {why}" for name, why in self.unquantized.items()]
        if self.compilation is not None:
            lines += ["", *_describe(self.compilation)]
        return "\n".join([*lines, "", "Advice", *(f"- {line}" for line in self.advice)])


def explain(
    model: nn.Module,
    *inputs: Any,
    more: Iterable[tuple[Any, ...] | Mapping[str, Any]] = (),
    compile: bool | dict[str, Any] = True,
    **kwargs: Any,
) -> Explanation:
    """Calls ``model(*inputs, **kwargs)`` and says what its quantised layers, and torch.compile, did.

    The model runs once in eager mode, then compiled, twice: a second call must not compile again. Gradient mode and
    autocast are those of the caller: explain under ``torch.inference_mode()`` what runs under it. Forgets everything
    that torch.compile has compiled in this process before (``torch._dynamo.reset``).

    Args:
        model: any module, quantised or not; one that torch.compile returned stands for the module inside.
        inputs: one call's arguments. A single dict of tensors, as a tokenizer returns it, gives the keyword arguments
            of models that take its keys as such, and is passed as it is to others.
        more: arguments of further calls, for example with other numbers of tokens; recompilations show there. A tuple
            holds positional arguments, a dict keyword arguments, which replace those of the same name in ``kwargs``.
        compile: False leaves torch.compile out; a dict is its arguments, for example ``{"mode": "max-autotune"}``.

    Raises:
        Exception: whatever the model raises in eager mode. What torch.compile raises is part of the result.
    """
    model = getattr(model, "_orig_mod", model)
    calls = [_call(model, arguments, kwargs) for arguments in (inputs, *more)]
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    seen = _eager(model, layers, calls)
    options = {} if compile is True else compile
    return Explanation(
        layers=seen,
        uncalled=[name for name in layers if name not in {call.name for call in seen}],
        unquantized=_unquantized(model),
        compilation=None if options is False else _compiled(model, [calls[0], *calls], options),
    )


def _call(model: nn.Module, arguments: tuple[Any, ...] | Mapping[str, Any], kwargs: dict[str, Any]) -> Call:
    if isinstance(arguments, Mapping):
        return (), {**kwargs, **arguments}
    if len(arguments) == 1 and isinstance(arguments[0], Mapping) and all(isinstance(key, str) for key in arguments[0]):
        try:
            inspect.signature(model.forward).bind(**{**kwargs, **arguments[0]})
        except TypeError:  # its keys are no arguments
            return arguments, kwargs
        return (), {**kwargs, **arguments[0]}
    return arguments, kwargs


def _unquantized(model: nn.Module) -> dict[str, str]:
    """Why linear layers are none of QuantLinear: what ``quantize_`` would say of them, asked for one scheme for all."""
    select = selector(model, Int8WeightOnly())
    layers = survey.find_layers(model)
    for layer in layers:
        survey.decide(layer, select, None)
    survey.resolve_tied_weights(model, layers, survey.find_embeddings(model), False)
    return {
        layer.row.name: "though it could be" if layer.scheme else layer.row.note or layer.row.status
        for layer in layers
        if not isinstance(layer.module, QuantLinear)
    }


def _eager(model: nn.Module, layers: dict[str, QuantLinear], calls: list[Call]) -> list[LayerCall]:
    seen: dict[tuple[Any, ...], LayerCall] = {}

    def record(name: str) -> Any:
        def hook(layer: QuantLinear, arguments: tuple[Any, ...]) -> None:
            x = layer.autocast(arguments[0])
            key = name, x.numel() // x.shape[-1], x.dtype, _is_copied(x)
            if key not in seen:
                seen[key] = _layer_call(name, layer, x)
            seen[key].calls += 1

        return hook

    handles = [layer.register_forward_pre_hook(record(name)) for name, layer in layers.items()]
    try:
        for arguments, keywords in calls:
            model(*arguments, **keywords)
    finally:
        for handle in handles:
            handle.remove()
    return list(seen.values())


def _layer_call(name: str, layer: QuantLinear, x: Tensor) -> LayerCall:
    n, k, tokens = layer.out_features, layer.in_features, x.numel() // x.shape[-1]
    plan = layer.scheme.plan(
        max(tokens, 1), n, k, x_dtype=x.dtype, scale_dtype=layer.scales.dtype, device=layer.qweight.device
    )
    kernel, why = (
        (None, "qao._host is not built, or no such device") if plan is None else (plan["kernel"], plan["text"])
    )
    dtype = str(x.dtype).removeprefix("torch.")
    if tokens == 0:
        kernel, why = "none", "no tokens"
    return LayerCall(name, (n, k), str(layer.scheme), tokens, dtype, 0, kernel, why, _is_copied(x))


def _is_copied(x: Tensor) -> bool:
    """Whether the operators copy x [..., K] first: elements of a row apart, or rows at no constant distance."""
    if x.numel() == 0 or x.dim() == 0:
        return False
    try:
        rows = x.view(-1, x.shape[-1])
    except RuntimeError:
        return True
    return (x.shape[-1] > 1 and rows.stride(1) != 1) or (rows.shape[0] > 1 and rows.stride(0) == 0)


def _compiled(model: nn.Module, calls: list[Call], options: dict[str, Any]) -> Compilation:
    from torch._dynamo import utils

    result = Compilation()
    torch._dynamo.reset()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    compiled = torch.compile(model, **options)
    try:
        for arguments, keywords in calls:
            compiled(*arguments, **keywords)
    except Exception as error:  # a failed compilation is a result here: what it says goes into the report
        result.error = f"{type(error).__name__}: {error}"
    frames = utils.get_compilation_metrics()
    result.graphs = utils.counters["stats"]["unique_graphs"]
    result.graph_inputs = [frame.graph_input_count or 0 for frame in frames if frame.graph_op_count]
    result.recompiles = [frame.recompile_reason for frame in frames if frame.recompile_reason]
    result.seconds = sum(frame.entire_frame_compile_time_s or 0.0 for frame in frames)
    if utils.counters["graph_break"]:
        result.breaks = _breaks(model, *calls[0]) or list(utils.counters["graph_break"])
    torch._dynamo.reset()
    return result


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


def _cells(call: LayerCall) -> tuple[str, ...]:
    shape, copied = "x".join(map(str, call.shape)), " (x is copied first)" if call.copied else ""
    kernel = call.kernel or "unknown"
    return shape, call.scheme, str(call.tokens), call.x_dtype, str(call.calls), kernel, call.why + copied


def _describe(c: Compilation) -> Iterator[str]:
    inputs = ", ".join(str(count) for count in c.graph_inputs)
    yield f"torch.compile: {c.graphs} graphs in {c.seconds:.1f} s; inputs of the graphs: {inputs or 'none'}"
    yield from (f"graph break: {text}" for text in c.breaks)
    yield from (f"recompiled: {_first_line(text)}" for text in c.recompiles)
    if c.error is not None:
        yield f"failed: {c.error}"


def _advice(e: Explanation) -> Iterator[str]:
    c = e.compilation
    if c is not None:
        if c.error is not None:
            yield (
                "torch.compile failed. Try backend='eager', then 'aot_eager', then 'inductor' to learn which stage "
                "does; docs/compile.md has the steps."
            )
        if c.breaks:
            yield (
                f"{len(c.breaks)} graph breaks: each costs host time in every call. Change the code at the places "
                "above, and compile with fullgraph=True, which makes a break an error. qao's layers break no graph."
            )
        sizes, modes, others = _by_cause(c.recompiles)
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
            yield f"{len(others)} recompilations for other reasons: make constant what the guards above name."
    if not e.layers and not e.uncalled:
        yield "Nothing is quantised: qao.quantize_(model, scheme) first, and look at the report it returns."
    if e.unquantized:
        yield f"{len(e.unquantized)} linear layers are not quantised; the reasons are above."
    if e.uncalled:
        yield f"{len(e.uncalled)} quantised layers were not called with these inputs."
    if copied := [call.name for call in e.layers if call.copied]:
        yield (
            f"x is copied before {len(copied)} layers ({copied[0]} …), since the elements of its rows are apart: "
            "give them x.contiguous() where it is made."
        )
    if slow := {call.scheme for call in e.layers if (call.kernel or "").startswith("scalar ")}:
        yield (
            f"The plain C++ kernel runs for {', '.join(sorted(slow))}: this CPU, or QAO_CPU_ISA, offers no vector "
            "kernel for it. Another scheme may be faster here; python -m qao doctor shows the instruction set."
        )


def _by_cause(recompiles: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Recompilations for a size or stride, for a tensor of another mode, and for anything else."""
    # The first time by comparison of tensors, then by conditions such as "args[0].stride()[0] == args[0].size()[1]".
    sizes = [text for text in recompiles if re.search(r"(size|stride) mismatch|\.(size|stride)\(\)", text)]
    modes = [text for text in recompiles if "dispatch key set mismatch" in text]
    return sizes, modes, [text for text in recompiles if text not in sizes and text not in modes]


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()
