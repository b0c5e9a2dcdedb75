"""SmoothQuant: migration of activation outliers into weights without changing the model's output.

The columns of a linear layer are multiplied by s, and the module that produces its input is divided by s: the preceding
norm, or a linear layer with outputs that reach it proportionally (up to down of a gated MLP, v to o of an attention,
fc1 to fc2 around a ReLU). Pairs are not found by name: every pair of matching sizes is tried, and kept if the
surrounding module computes the same. All s are powers of two, so the scaling does not round.

Source: Xiao et al.: SmoothQuant, arXiv:2211.10438; the search for pairs and the powers of two are not from the paper.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..nn.eligibility import is_linear
from ..nn.linear import linear_weight
from ..ops import modes
from ..quantization.walk import Layer
from .stream import Call, called

_STRENGTH = 0.5  # migration strength alpha: fraction of the activation range moved to the weights
_SAMPLES = 32  # number of samples for the ranges
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}  # relative, of equal outputs; 2 % for 16-bit dtypes

Restore = Callable[[], None]


@dataclass
class _Trace:
    """Inputs and outputs of each module for one sample. Tensors are compared by identity."""

    calls: dict[nn.Module, list[tuple[Call, Any]]]

    @classmethod
    def of(cls, model: nn.Module, call: Call) -> _Trace:
        calls: dict[nn.Module, list[tuple[Call, Any]]] = {}

        def note(module: nn.Module, args: Any, keywords: Any, output: Any) -> None:
            calls.setdefault(module, []).append(((args, keywords), output))

        handles = [m.register_forward_hook(note, with_kwargs=True) for m in model.modules()]
        try:
            called(model, *call)
        finally:
            for handle in handles:
                handle.remove()
        return cls(calls)

    def once(self, module: nn.Module) -> tuple[Call, Any] | None:
        calls = self.calls.get(module, [])
        return calls[0] if len(calls) == 1 else None

    def run(self, module: nn.Module) -> list[Tensor]:
        """The module's present outputs for its recorded inputs."""
        recorded = self.once(module)
        assert recorded is not None
        (args, keywords), _ = recorded
        return [
            t for t in tree_leaves(called(module, args, keywords)) if isinstance(t, Tensor) and t.is_floating_point()
        ]


def smooth(model: nn.Module, calls: Sequence[Call], units: Iterable[list[Layer]], folded: list[Restore]) -> None:
    """Scales the layers of ``units`` with quantized activations; appends functions that undo it to ``folded``.

    Raises:
        ValueError: the model has LoRA adapters, which read the same inputs.
    """
    if any(part.startswith("lora_") for name, _ in model.named_modules() for part in name.split(".")):
        raise ValueError(
            "calibrate: smoothquant would change the inputs of LoRA adapters; merge them first, or use gptq"
        )
    layers = [unit[0] for unit in units if len(unit) == 1 and unit[0].scheme is not None]
    wanted = {
        layer.module: layer.row.name for layer in layers if getattr(layer.scheme, "activations", "float") != "float"
    }
    if not wanted:
        return
    trace = _Trace.of(model, calls[0])
    whole = trace.run(model)
    ranges = _ranges(model, calls[:: max(1, len(calls) // _SAMPLES)], list(wanted))
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    uses = [id(p) for module in model.modules() for p in module._parameters.values() if p is not None]
    pairs = [*_norms(model, trace, wanted), *_linears(trace, wanted, parents)]
    done: set[nn.Module] = set()
    for maker, readers in pairs:
        owned = [p for module in (maker, *readers) for p in module._parameters.values() if p is not None]
        if done & set(readers) or any(uses.count(id(p)) > 1 for p in owned):
            continue
        around = _around([maker, *readers], parents, trace)
        if around is None or not all(reader in ranges for reader in readers):
            continue
        k = linear_weight(readers[0]).shape[1]
        for fold in _folds(maker):
            # Random factors far from 1, so that a wrong pair changes the output.
            trial = 2.0 ** torch.randint(-2, 3, (k,), generator=torch.Generator().manual_seed(k))
            expected = trace.run(around)  # again, because earlier layers may be scaled by now
            undo = _fold(maker, readers, trial, fold)
            proven = all(map(_close, trace.run(around), expected))
            undo()
            if proven:
                folded.append(_fold(maker, readers, _factors(readers, ranges), fold))
                done.update(readers)
                break
    if not all(map(_close, trace.run(model), whole)):
        for restore in reversed(folded):
            restore()
        folded.clear()
        warnings.warn("calibrate: scaling changed the model's output and was undone", stacklevel=4)


def _norms(model: nn.Module, trace: _Trace, wanted: dict[nn.Module, str]) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Modules with a weight [K] and an output that is the input of linear layers, with these layers."""
    found = []
    for module in model.modules():
        weight, recorded = module._parameters.get("weight"), trace.once(module)
        if weight is None or weight.dim() != 1 or recorded is None:
            continue
        every = [m for m in trace.calls if is_linear(m) and any(_input(c) is recorded[1] for c, _ in trace.calls[m])]
        if every and all(m in wanted and trace.once(m) for m in every):
            found.append((module, every))
    return found


def _linears(
    trace: _Trace, wanted: dict[nn.Module, str], parents: dict[nn.Module, nn.Module]
) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Sibling linear layers with as many outputs as a linear layer has inputs, with that layer."""
    found: list[tuple[nn.Module, list[nn.Module]]] = []
    for reader in wanted:
        k = linear_weight(reader).shape[1]
        for other in parents[reader].children():
            if other is not reader and is_linear(other) and trace.once(other) and trace.once(reader):
                if linear_weight(other).shape[0] == k:
                    found.append((other, [reader]))
    return found


def _input(call: Call) -> Any:
    return call[0][0] if call[0] else call[1].get("input")


def _around(modules: list[nn.Module], parents: dict[nn.Module, nn.Module], trace: _Trace) -> nn.Module | None:
    """The smallest module that contains all these and was called exactly once."""
    paths = []
    for module in modules:
        path = [module]
        while path[-1] in parents:
            path.append(parents[path[-1]])
        paths.append(path)
    common = [m for m in paths[0][1:] if all(m in path for path in paths)]
    return next((m for m in common if trace.once(m) is not None), None)


def _ranges(model: nn.Module, calls: Sequence[Call], modules: list[nn.Module]) -> dict[nn.Module, Tensor]:
    """The largest magnitude of each column of the inputs of linear layers, float32 [K]."""
    ranges: dict[nn.Module, Tensor] = {}

    @modes.neutral()
    def note(module: nn.Module, args: Any, keywords: Any) -> None:
        x = args[0] if args else keywords["input"]
        if x.numel():
            largest = x.detach().reshape(-1, x.shape[-1]).abs().amax(0).float()
            ranges[module] = torch.maximum(ranges.get(module, largest), largest)

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    try:
        for args, keywords in calls:
            called(model, args, keywords)
    finally:
        for handle in handles:
            handle.remove()
    return ranges


def _factors(readers: list[nn.Module], ranges: dict[nn.Module, Tensor]) -> Tensor:
    """Powers of two [K] for the columns of the weights; 1 where a range is zero or not finite."""
    inputs = ranges[readers[0]]
    weights = torch.stack([linear_weight(reader).abs().amax(0).float() for reader in readers]).amax(0)
    factors = inputs**_STRENGTH / weights ** (1 - _STRENGTH)
    usual = factors[factors.isfinite() & (factors > 0)]
    factors = factors / usual.log2().mean().exp2() if usual.numel() else factors
    exponents = factors.log2().round().clamp(-12, 12)
    return torch.where(factors.isfinite() & (factors > 0), exponents.exp2(), torch.ones_like(factors))


def _folds(maker: nn.Module) -> Sequence[str]:
    return ("weight",) if is_linear(maker) else ("weight", "1 + weight")


def _fold(maker: nn.Module, readers: list[nn.Module], factors: Tensor, form: str) -> Restore:
    """Divides the output of ``maker`` by ``factors`` and multiplies the columns of ``readers``; returns the undo."""
    before = {name: p.detach().clone() for name, p in maker._parameters.items() if p is not None and p.dim() == 1}
    factors = factors.to(linear_weight(readers[0]).device)

    def multiply(by: Tensor) -> None:
        for reader in readers:
            linear_weight(reader).mul_(by.to(linear_weight(reader).dtype))

    def restore() -> None:
        with modes.writing(*written):
            multiply(1 / factors)
            for name, values in before.items():
                maker._parameters[name].detach().copy_(values)  # type: ignore[union-attr]
            if is_linear(maker):
                linear_weight(maker).mul_(factors[:, None].to(linear_weight(maker).dtype))

    written = [parameter for module in (maker, *readers) for parameter in module._parameters.values()]
    with modes.writing(*written):
        multiply(factors)
        for name in before:
            own = maker._parameters[name]
            assert own is not None
            value = own.detach()
            shifted = form == "1 + weight" and name == "weight"
            value.copy_((value.float() + 1) / factors - 1 if shifted else value / factors.to(value.dtype))
        if is_linear(maker):
            linear_weight(maker).div_(factors[:, None].to(linear_weight(maker).dtype))
    return restore


def _close(new: Tensor, old: Tensor) -> bool:
    if new.shape != old.shape:
        return False
    size = old.double().norm().item()
    error = (new.double() - old.double()).norm().item()
    return bool(error <= _TOLERANCE.get(old.dtype, 0.02) * size)
