"""Group sizes of layers in four bits, chosen within a budget: ``Int4WeightOnly(group_size="auto", budget_bits=4.5)``.

Of each layer and size the share of the output's energy that rounding takes is measured, ‖(W - Ŵ) X‖² / ‖W X‖², with
inputs X of calibration or, without data, with columns weighed as the search for ranges weighs them. The sum of these
over layers is what the choice makes small: errors of layers add up, and each layer's is relative to its own output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..nn.linear import linear_weight
from ..quant_primitives.importance import checked_importance, estimate_importance
from ..schemes import GROUP_SIZES, Int4Weight, Scheme
from .targets import Layer, byte_count


class Option(NamedTuple):
    """One group size of one layer."""

    size: int
    bits: int  # of all that is stored of the weight
    error: float  # share of the output's energy


Errors = Mapping[int, float]  # by group size


def is_auto(scheme: Scheme | None) -> bool:
    return isinstance(scheme, Int4Weight) and scheme.group_size == "auto"


def fixed(scheme: Scheme, size: int) -> Scheme:
    """The same with this group size where it is to be chosen."""
    return replace(scheme, group_size=size, budget_bits=None) if is_auto(scheme) else scheme  # type: ignore[type-var]


def sizes_for(k: int) -> list[int]:
    """Below K, and -1 for a whole row.

    Where 128 or 256 divides K, only sizes that do: every format of checkpoints can hold these. Elsewhere there would be
    nothing between 64 and a whole row.
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
    """The error of a weight [N, K] rounded to nearest, for every size it may have.

    ``squares``: of a difference [N, K] the energy it gives the output; None: its squares, weighed by ``importance``.
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
    """Of each unit what ``assign`` needs, without data; ``importance`` by names of layers as of ``quantize_``."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # here, to keep `import qao` light

    found: list[Errors] = []
    for layer, *_ in tqdm(units, desc="group sizes", unit="layer", delay=2, disable=not progress):
        if not is_auto(layer.scheme):
            found.append({})
            continue
        assert layer.scheme is not None
        name, weight = layer.row.name, linear_weight(layer.module)
        if weight.is_meta:
            raise ValueError(
                f"quantize_: {name} is on meta, and group_size='auto' has to see the numbers. Load the model first, or "
                "give the group size of each layer."
            )
        weight = weight if device is None else weight.to(device)
        found.append(weight_errors(weight, layer.scheme, name, importance.get(name)))
    return found


def assign(units: Sequence[Sequence[Layer]], errors: Sequence[Errors]) -> None:
    """Gives layers whose group size is to be chosen theirs: one budget for all layers of one scheme.

    Args:
        units: layers with one weight each, as ``quantize.units_of`` makes them; other schemes are left alone.
        errors: of each unit; of those with other schemes, empty.

    Raises:
        ValueError: a budget is below what the largest groups take.
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
    """A size for each layer, of small total error, whose bits are within the budget of ``scheme`` for all elements.

    Of each layer only sizes on the lower convex hull of error over bits count. From the fewest bits, whatever saves the
    most error a bit is taken as long as it fits: the best choice there is, but for what the last steps leave over.
    """
    assert isinstance(scheme, Int4Weight) and scheme.budget_bits is not None
    hulls = [_hull(one) for one in options]
    chosen = [0] * len(hulls)
    left = scheme.budget_bits * sum(elements) - sum(hull[0].bits for hull in hulls)
    if left < 0:
        least = sum(hull[0].bits for hull in hulls) / sum(elements)
        raise ValueError(
            f"{type(scheme).__name__}: budget_bits={scheme.budget_bits:g} is not enough: these {len(hulls)} layers "
            f"take {least:.3f} bits a weight with the largest groups, scales and zero points included. Give more, or "
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
    """Of a weight of this shape and dtype, with what each size takes in memory."""
    n, k = shape
    options = []
    for size, error in errors.items():
        packed = fixed(scheme, size).empty(n, k, dtype=dtype, device="meta")
        stored = byte_count(*(tensor for tensor in packed.tensors().values() if tensor is not None))
        options.append(Option(size, 8 * stored, error))
    return options


def _hull(options: Sequence[Option]) -> list[Option]:
    """The lower convex hull, from the fewest bits on: each step has more bits, less error, and less of it a bit."""
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
