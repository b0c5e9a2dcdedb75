"""Automatic int4 group sizes within a bit budget: ``group_size="auto"`` with ``budget_bits``.

For each layer and size it measures the relative output error ‖(W - Ŵ) X‖² / ‖W X‖², with calibration inputs X or,
without data, with the column importance of the clipping search. The selection minimizes the sum of these over layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..quant_primitives.importance import checked_importance, estimate_importance
from ..schemes import GROUP_SIZES, Int4Weight, Scheme
from .walk import Layer, byte_count


class Option(NamedTuple):
    """One group size of one layer."""

    size: int
    bits: int  # of all stored tensors of the weight
    error: float  # relative squared output error


Errors = Mapping[int, float]  # by group size


def is_auto(scheme: Scheme | None) -> bool:
    return isinstance(scheme, Int4Weight) and scheme.group_size == "auto"


def fixed(scheme: Scheme, size: int) -> Scheme:
    """The scheme with this group size instead of "auto"; other schemes unchanged."""
    return replace(scheme, group_size=size, budget_bits=None) if is_auto(scheme) else scheme  # type: ignore[type-var]


def sizes_for(k: int) -> list[int]:
    """Candidate sizes: those below K, and -1 for a whole row.

    If 128 divides K, only sizes that divide K: every checkpoint format supports these. For other K that rule would
    leave no size between 64 and a whole row.
    """
    whole = k % 128 == 0
    return [size for size in GROUP_SIZES if size == -1 or (size < k and not (whole and k % size))]


def weight_errors(
    weight: Tensor,
    scheme: Scheme,
    name: str,
    importance: Tensor | None,
    squares: Callable[[Tensor], Tensor] | None = None,
) -> Errors:
    """The round-to-nearest error of a weight [N, K] for every candidate size.

    ``squares``: maps a difference [N, K] to its squared output error; None: squares weighted by ``importance``.
    """
    if importance is None:
        importance = estimate_importance(weight)
    importance = checked_importance(importance, weight, name)
    values = weight.detach().float()

    def energy(difference: Tensor) -> float:
        energies = torch.mv(difference.square(), importance) if squares is None else squares(difference)
        return energies.sum(dtype=torch.float64).item()

    n, k = weight.shape
    whole = energy(values)
    errors = {}
    for size in sizes_for(k):
        one = fixed(scheme, size)
        packed = one.quantize(weight.detach(), name, importance)
        back = one.dequantize(packed.qweight, packed.scales, n, k, torch.float32)
        errors[size] = max(0.0, energy(back.sub_(values)) / whole) if whole else 0.0
    return errors


def measured(
    units: Sequence[Sequence[Layer]],
    importance: Mapping[str, Tensor],
    device: torch.device | str | None,
    progress: bool,
) -> list[Errors]:
    """Errors of each unit for ``assign``, without data; ``importance`` by layer name as in ``quantize_``."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # here, to keep `import qao` light

    found: list[Errors] = []
    for layer, *_ in tqdm(units, desc="group sizes", unit="layer", delay=2, disable=not progress):
        if not is_auto(layer.scheme):
            found.append({})
            continue
        assert layer.scheme is not None
        name, weight = layer.row.name, layer.weight
        if weight.is_meta:
            raise ValueError(
                f"quantize_: {name} is on meta, and group_size='auto' needs the values. Load the model first, or "
                "pass a group size for each layer."
            )
        weight = weight if device is None else weight.to(device)
        found.append(weight_errors(weight, layer.scheme, name, importance.get(name)))
    return found


def assign(units: Sequence[Sequence[Layer]], errors: Sequence[Errors]) -> None:
    """Assigns group sizes to layers with "auto"; all layers of one scheme share its budget.

    Args:
        units: layers that share a weight, from ``quantize.units_of``; other schemes are unchanged.
        errors: of each unit; empty for other schemes.

    Raises:
        ValueError: a budget is below the bits of the largest groups.
    """
    together: dict[Scheme, list[int]] = {}
    for index, unit in enumerate(units):
        if is_auto(unit[0].scheme):
            assert unit[0].scheme is not None
            together.setdefault(unit[0].scheme, []).append(index)
    for scheme, indices in together.items():
        firsts = [units[index][0] for index in indices]
        options = [
            options_of(layer.row.shape, layer.x_dtype, scheme, errors[index])
            for layer, index in zip(firsts, indices, strict=True)
        ]
        elements = [layer.elements for layer in firsts]
        for index, size in zip(indices, choose(options, elements, scheme), strict=True):
            for layer in units[index]:
                layer.scheme = fixed(scheme, size)
                layer.row.scheme = str(layer.scheme)


def choose(options: Sequence[Sequence[Option]], elements: Sequence[int], scheme: Scheme) -> list[int]:
    """A size for each layer that minimizes the total error within the bit budget of ``scheme``.

    Greedy: only sizes on each layer's lower convex hull of error over bits are candidates. From the fewest bits on, it
    takes the step that saves the most error per bit as long as it fits. This is optimal except for the unused rest of
    the budget.
    """
    assert isinstance(scheme, Int4Weight) and scheme.budget_bits is not None
    hulls = [_hull(one) for one in options]
    chosen = [0] * len(hulls)
    left = scheme.budget_bits * sum(elements) - sum(hull[0].bits for hull in hulls)
    if left < 0:
        least = sum(hull[0].bits for hull in hulls) / sum(elements)
        raise ValueError(
            f"{type(scheme).__name__}: budget_bits={scheme.budget_bits:g} is not enough: these {len(hulls)} layers "
            f"take {least:.3f} bits per weight with the largest groups, scales and zero points included. Use more, or "
            "scale_dtype=torch.float16, or symmetric=True."
        )
    steps = [
        ((before.error - after.error) / (after.bits - before.bits), layer, step)
        for layer, hull in enumerate(hulls)
        for step, (before, after) in enumerate(zip(hull, hull[1:], strict=False), 1)
    ]
    for _, layer, step in sorted(steps, key=lambda one: (-one[0], one[1], one[2])):
        cost = hulls[layer][step].bits - hulls[layer][step - 1].bits
        if step == chosen[layer] + 1 and cost <= left:
            chosen[layer], left = step, left - cost
    return [hull[step].size for hull, step in zip(hulls, chosen, strict=True)]


def options_of(shape: Sequence[int], dtype: torch.dtype, scheme: Scheme, errors: Errors) -> list[Option]:
    """Options of a weight of this shape and dtype, with the memory of each size."""
    n, k = shape
    options = []
    for size, error in errors.items():
        packed = fixed(scheme, size).empty(n, k, dtype=dtype, device="meta")
        stored = byte_count(*(tensor for tensor in packed.tensors().values() if tensor is not None))
        options.append(Option(size, 8 * stored, error))
    return options


def _hull(options: Sequence[Option]) -> list[Option]:
    """The lower convex hull from the fewest bits on: each step adds bits, reduces the error, and saves less per bit."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda one: (one.bits, one.error)):
        if hull and option.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _above(first: Option, middle: Option, last: Option) -> bool:
    """Whether ``middle`` is not below the line between the others."""
    saved = (first.error - middle.error) * (last.bits - first.bits)
    return saved <= (first.error - last.error) * (middle.bits - first.bits)
