"""Tensors and numbers of a GEMM call, from the operator's schema: tensors come first, numbers after."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Signature(NamedTuple):
    tensors: int  # number of tensors, from x on
    others: int  # those that not every dense or grouped GEMM has
    has_scales: bool  # as a tensor apart from the weight
    names: tuple[str, ...]  # of the numbers
    defaults: tuple[Any, ...]


SIGNATURES: dict[Any, Signature] = {}


def check_order(name: str, **tensors: Any) -> None:
    """Raises TypeError if one of ``tensors`` is a number: before qao 0.2 some numbers came before tensors."""
    for argument, value in tensors.items():
        if isinstance(value, (int, float, torch.dtype)):
            schema = str(getattr(torch.ops.qao, name).default._schema).removeprefix("qao::")
            raise TypeError(
                f"qao.ops.{name}: {argument} must be a tensor or None. Got {value}. Since qao 0.2 tensors come before "
                f"numbers: {schema}. Pass the arguments in this order or by name."
            )


def note_signature(operator: Any) -> None:
    """Registers a GEMM operator for the functions of this module."""
    arguments = operator._schema.arguments
    names = [argument.name for argument in arguments]
    first = next(index for index, argument in enumerate(arguments) if "Tensor" not in str(argument.type))
    defaults = tuple(argument.default_value for argument in arguments[first:])
    shared = names.index("row_scale" if "offsets" in names else "bias") + 1
    SIGNATURES[operator] = Signature(first, first - shared, "scales" in names, tuple(names[first:]), defaults)


def sizes_among(operator: Any, numbers: tuple[Any, ...]) -> list[Any]:
    """N, K and group_size of a packed weight, or the qtype of GGUF blocks.

    Empty if the caller omitted sizes, and for other weights.
    """
    first = SIGNATURES[operator].names[0]
    if first == "qtype":
        return list(numbers[:1])
    return list(numbers[:3]) if first == "out_features" and any(numbers[:3]) else []


def rotation_among(operator: Any, numbers: tuple[Any, ...]) -> int:
    """``x_rotation``; 0 if the operator has none."""
    names = SIGNATURES[operator].names
    position = names.index("x_rotation") if "x_rotation" in names else len(numbers)
    return numbers[position] if position < len(numbers) else 0


def invariant(
    operator: Any, others: tuple[Any, ...], numbers: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """All other tensors, and the numbers, of a call with ``batch_invariant``."""
    _, count, _, names, defaults = SIGNATURES[operator]
    position = names.index("batch_invariant")
    before = (numbers + defaults[len(numbers) :])[:position]
    return others + (None,) * (count - len(others)), (*before, True, *numbers[position + 1 :])
