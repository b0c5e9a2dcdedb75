"""Sensitivity of a language model to quantizing each layer alone, to find layers that need more bits.

    costs = by_layer(model, tokens, qao.Int4WeightOnly())
    worst = sorted(costs, key=lambda cost: cost.divergence)[-3:]

One layer changes the loss by less than the loss varies between texts. The Kullback-Leibler divergence of the quantized
model's predictions from the float model's is never negative and has a small standard error on a few hundred tokens. It
equals the increase of the loss wherever the float model is right about the text.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..nn.linear import QuantLinear, pack_weight
from ..ops import modes
from ..quantization import quantize
from ..quantization.callbacks import layer_filter
from ..quantization.module_swap import put_module
from ..quantization.walk import Layer
from ..schemes import Scheme
from .perplexity import divergence, log_probabilities, mean_and_error, windows

__all__ = ["LayerCost", "by_layer"]


@dataclass(frozen=True)
class LayerCost:
    """Cost of quantizing one layer while all others stay in float.

    Attributes:
        name: the linear layer; for layers that share a weight, the first.
        scheme: the scheme it was quantized with.
        shape: [N, K] of its weight.
        divergence: divergence from the predictions of the float model, nats per token.
        divergence_error: its standard error over windows; NaN for a single window.
        nats_per_token: increase of the loss on the text; negative is better.
        standard_error: its standard error over windows; NaN for a single window.
        relative_error: ‖W - Ŵ‖ / ‖W‖.
    """

    name: str
    scheme: str
    shape: tuple[int, ...]
    divergence: float
    divergence_error: float
    nats_per_token: float
    standard_error: float
    relative_error: float | None


@modes.neutral()
def by_layer(
    model: nn.Module,
    tokens: Sequence[int] | Tensor,
    scheme: Scheme | Mapping[str, Scheme | None] | Callable[..., Scheme | None],
    *,
    window: int = 512,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    progress: bool = True,
    filter: Callable[..., bool] | None = None,
) -> list[LayerCost]:
    """Quantize one layer at a time and measure the effect on a text. The model is restored at the end.

    Args:
        model: a causal language model as ``perplexity.perplexity`` takes it; layers to quantize are in float.
        tokens, window: as for ``perplexity.perplexity``. The model runs once per layer and window.
        scheme, filter_fn, progress, filter: as for ``quantize_``. Memory holds all layers both in float and quantized.

    Returns:
        A LayerCost for each weight that ``quantize_`` would quantize, in the model's order.

    Raises:
        TypeError, ValueError: as ``quantize_`` and ``perplexity.perplexity``; a layer is on meta; or no layer is
            quantized.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # here, to keep `import qao` light

    filter_fn = layer_filter(filter_fn, filter, "diagnostics.sensitivity.by_layer")
    pieces = windows(model, tokens, window)
    planned = quantize.plan(model, scheme, filter_fn, False, None, False)
    units = quantize.units_of(planned.pending)
    if not units:
        raise ValueError("by_layer: the scheme quantizes no layer of this model")
    for unit in units:
        if unit[0].weight.is_meta:
            raise ValueError(f"by_layer: {unit[0].row.name} is on meta, so the model cannot run. Load it first.")
    importance = quantize.importance_of(planned.layers)
    made = [_quantized(unit, importance.get(unit[0].row.name)) for unit in units]
    found: list[list[tuple[float, float]]] = [[] for _ in units]
    with tqdm(total=len(units) * len(pieces), delay=2, disable=not progress) as bar:
        for piece in pieces:
            with modes.callers():
                exact = log_probabilities(model, piece)
            for unit, (module, _), sums in zip(units, made, found, strict=True):
                with _in_place(unit, module), modes.callers():
                    other = log_probabilities(model, piece)
                sums.append(divergence(other, exact, piece))
                bar.update()
    counts = [len(piece) - 1 for piece in pieces]
    return [
        LayerCost(
            unit[0].row.name,
            str(unit[0].scheme),
            unit[0].row.shape,
            *mean_and_error([divergence for divergence, _ in sums], counts),
            *mean_and_error([rise for _, rise in sums], counts),
            error,
        )
        for unit, (_, error), sums in zip(units, made, found, strict=True)
    ]


def _quantized(unit: list[Layer], importance: Tensor | None) -> tuple[QuantLinear, float | None]:
    first = unit[0]
    assert first.scheme is not None
    packed = pack_weight(first.weight, first.scheme, None, first.row.name, importance)
    return QuantLinear.from_packed(first.module, first.scheme, packed).eval(), packed.relative_error


@contextlib.contextmanager
def _in_place(unit: list[Layer], module: QuantLinear) -> Iterator[None]:
    """Temporarily replace all layers that share a weight with a quantized module. Each layer keeps its bias."""
    places = [(parent, attribute, layer.module) for layer in unit for parent, attribute in layer.places]
    successors: dict[int, nn.Module] = {id(unit[0].module): module}
    for layer in unit[1:]:
        assert layer.scheme is not None
        successors[id(layer.module)] = QuantLinear.from_packed(layer.module, layer.scheme, module.packed)
    try:
        for parent, attribute, before in places:
            put_module(parent, attribute, successors[id(before)])
        yield
    finally:
        for parent, attribute, before in places:
            put_module(parent, attribute, before)


def blocks(costs: Sequence[LayerCost]) -> Iterator[tuple[str, list[tuple[int, LayerCost]]]]:
    """Layers that differ only in the first number of their names, as (number, layer); others by position."""
    groups: dict[str, list[tuple[int, LayerCost]]] = {}
    for order, cost in enumerate(costs):
        number = re.search(r"\d+", cost.name)
        kind = cost.name if number is None else cost.name[number.end() :].lstrip(".") or cost.name
        groups.setdefault(kind, []).append((order if number is None else int(number[0]), cost))
    yield from groups.items()
