"""What a quantized model does with given inputs: the kernel of each layer and why, and torch.compile."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from .._words import counted
from ..nn.linear import QuantLinear
from ..nn.model_check import check_module
from ..quantization import targets
from ..quantization.report import common_name, table
from ..quantization.rules import selector
from ..quantization.walk import walk
from ..schemes import Int8WeightOnly
from .compile_report import Call, Compilation, compiled


@dataclass
class LayerCall:
    """One QuantLinear and the inputs that reached it."""

    name: str
    shape: tuple[int, int]  # N, K
    scheme: str
    tokens: int  # M
    x_dtype: str
    calls: int  # number of calls with this M and dtype
    kernel: str | None  # None if unknown
    why: str  # the plan, or the inputs of the heuristic
    copied: bool  # whether x is copied before the kernel because its row stride is not constant


@dataclass
class Explanation:
    """The result of ``explain``; print it, and put it into a bug report with the output of ``python -m qao doctor``."""

    layers: list[LayerCall]
    uncalled: list[str]  # QuantLinears that were not called
    unquantized: dict[str, str]  # other linear layers, and why they are not quantized
    compilation: Compilation | None  # None: not requested

    @property
    def advice(self) -> list[str]:
        """Recommendations, most important first."""
        return list(_advice(self)) or ["Nothing: every layer has its kernel, and one compilation served every call."]

    def to_dict(self) -> dict[str, Any]:
        """The result in JSON types."""
        return asdict(self) | {"advice": self.advice}

    def __str__(self) -> str:
        header = ("layer", "shape", "scheme", "M", "x", "calls", "kernel", "why")
        alike: dict[tuple[str, ...], list[str]] = {}
        for call in self.layers:
            alike.setdefault((re.sub(r"\d+", "#", call.name), *_cells(call)), []).append(call.name)
        lines = table(header, [(common_name(names), *cells) for (_, *cells), names in alike.items()])
        lines += [f"{name}: not called" for name in _joined(dict.fromkeys(self.uncalled, ""))]
        lines += [f"{name}: not quantized: {why}" for name, why in _joined(self.unquantized).items()]
        if self.compilation is not None:
            lines += ["", *self.compilation.describe()]
        return "\n".join([*lines, "", "Advice", *(f"- {line}" for line in self.advice)])


def _joined(notes: Mapping[str, str]) -> dict[str, str]:
    """Notes by name. Names that differ only in their numbers share one entry."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, note in notes.items():
        alike.setdefault((re.sub(r"\d+", "#", name), note), []).append(name)
    return {common_name(names): note for (_, note), names in alike.items()}


def explain(
    model: nn.Module,
    *inputs: Any,
    more: Iterable[tuple[Any, ...] | Mapping[str, Any]] = (),
    compile: bool | dict[str, Any] = True,
    **kwargs: Any,
) -> Explanation:
    """Call ``model(*inputs, **kwargs)`` and report what its quantized layers and torch.compile did.

    The model runs once in eager mode, then twice compiled; a second call must not compile again. Gradient mode and
    autocast are those of the caller: to explain inference, call under ``torch.inference_mode()``. Resets everything
    that torch.compile has compiled in this process (``torch._dynamo.reset``).

    Args:
        model: any module, quantized or not. A compiled module stands for the module inside.
        inputs: arguments of one call. A single dict of tensors, as a tokenizer returns it, gives the keyword arguments
            of models that take its keys; other models get it unchanged.
        more: arguments of further calls, for example with other numbers of tokens, to show recompilations. A tuple
            holds positional arguments, a dict keyword arguments that replace those of the same name in ``kwargs``.
        compile: False skips torch.compile; a dict is its arguments, for example ``{"mode": "max-autotune"}``.

    Raises:
        Exception: whatever the model raises in eager mode. Errors of torch.compile are part of the result.
    """
    check_module(model, "explain")
    model = getattr(model, "_orig_mod", model)
    calls = [_call(model, arguments, kwargs) for arguments in (inputs, *more)]
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    seen = _eager(model, layers, calls)
    options = {} if compile is True else compile
    return Explanation(
        layers=seen,
        uncalled=[name for name in layers if name not in {call.name for call in seen}],
        unquantized=_unquantized(model),
        compilation=None if options is False else compiled(model, [calls[0], *calls], options),
    )


def _call(model: nn.Module, arguments: tuple[Any, ...] | Mapping[str, Any], kwargs: dict[str, Any]) -> Call:
    if isinstance(arguments, Mapping):
        return (), {**kwargs, **arguments}
    if len(arguments) == 1 and isinstance(arguments[0], Mapping) and all(isinstance(key, str) for key in arguments[0]):
        try:
            inspect.signature(model.forward).bind(**{**kwargs, **arguments[0]})
        except TypeError:  # its keys are not parameters
            return arguments, kwargs
        return (), {**kwargs, **arguments[0]}
    return arguments, kwargs


def _unquantized(model: nn.Module) -> dict[str, str]:
    """Why linear layers are not QuantLinears, according to ``quantize_`` with one scheme for the whole model."""
    found = walk(model)
    targets.decide(found, selector(found, Int8WeightOnly()), None)
    targets.resolve_tied_weights(found, False)
    return {
        layer.row.name: "though it could be" if layer.scheme else layer.row.note or layer.row.status
        for layer in found.linears
        if not layer.already_quantized
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
    """Whether the operators first copy x [..., K]: noncontiguous rows, or no constant row stride."""
    if x.numel() == 0 or x.dim() == 0:
        return False
    try:
        rows = x.view(-1, x.shape[-1])
    except RuntimeError:
        return True
    return (x.shape[-1] > 1 and rows.stride(1) != 1) or (rows.shape[0] > 1 and rows.stride(0) == 0)


def _cells(call: LayerCall) -> tuple[str, ...]:
    shape, copied = "x".join(map(str, call.shape)), " (x is copied first)" if call.copied else ""
    kernel = call.kernel or "unknown"
    return shape, call.scheme, str(call.tokens), call.x_dtype, str(call.calls), kernel, call.why + copied


def _advice(e: Explanation) -> Iterator[str]:
    if e.compilation is not None:
        yield from e.compilation.advice()
    if not e.layers and not e.uncalled:
        yield "Nothing is quantized: qao.quantize_(model, scheme) first, and look at the report it returns."
    if e.unquantized:
        yield f"Not quantized: {counted(len(e.unquantized), 'linear layer')}, for the reasons above."
    if e.uncalled:
        yield f"Not called with these inputs: {counted(len(e.uncalled), 'quantized layer')}."
    if copied := [call.name for call in e.layers if call.copied]:
        yield (
            f"x is copied before {counted(len(copied), 'layer')} ({copied[0]}{' …' if copied[1:] else ''}), because "
            "its rows are not contiguous: call x.contiguous() where x is made."
        )
    if slow := {call.scheme for call in e.layers if (call.kernel or "").startswith("scalar ")}:
        yield (
            f"The plain C++ kernel runs for {', '.join(sorted(slow))}: this CPU, or QAO_CPU_ISA, has no vector "
            "kernel for it. Another scheme may be faster here; python -m qao doctor shows the instruction set."
        )
