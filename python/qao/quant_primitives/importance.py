"""Column importance for weight quantization without calibration data, estimated from weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.serial import SERIAL_VALUES

_ROWS_OF_A_TABLE = 16  # rows / columns of heads and embeddings; layers inside a model have a smaller ratio
_LEAST_MEAN_SQUARE = 1e-4  # relative mean square added to each column or row, which bounds the importance
# Layers with importance estimated from a sibling's weight, by name (measured on SmolLM2, docs/numerics.md). Layers
# after a norm share their activations; the columns of the named sibling, possibly the layer itself, predict these best.
# The columns of queries, keys and gates predict them much less.
_READ_BY = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "v_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "up_proj"),
    **dict.fromkeys(("query", "key", "value"), "value"),
    **dict.fromkeys(("q_lin", "k_lin", "v_lin"), "v_lin"),
    **dict.fromkeys(("w1", "w3"), "w3"),
    **dict.fromkeys(("wi_0", "wi_1"), "wi_1"),
}
# Layers that read act(gate) * up, with the two layers that have rows to estimate it from.
_MADE_BY = {"down_proj": ("gate_proj", "up_proj"), "w2": ("w1", "w3"), "wo": ("wi_0", "wi_1")}
# Activations after norms vary more than the columns of the layers that read them: by this power.
_POWER_BEHIND_NORMS = 1.5


def importance_sources(name: str) -> tuple[str, ...]:
    """Names of the layers with weights from which the activations of layer ``name`` are estimated; may be empty."""
    parent, dot, own = name.rpartition(".")
    others = _MADE_BY.get(own) or ((_READ_BY[own],) if own in _READ_BY else ())
    return tuple(f"{parent}{dot}{other}" for other in others)


def importance_part(weight: Tensor, name: str) -> Tensor:
    """float32: what the weight of one of ``importance_sources(name)`` adds to the importance of layer ``name``."""
    if name.rpartition(".")[2] in _MADE_BY:
        return _relative_squares(weight.detach(), 1)
    return estimate_importance(weight).pow_(_POWER_BEHIND_NORMS)


def inferred_importance(parts: Sequence[Tensor], k: int) -> Tensor | None:
    """float32 [k]: importance from the ``importance_part`` of all ``importance_sources``; None if sizes differ."""
    if not parts or any(part.shape[0] != k for part in parts):
        return None
    return parts[0] if len(parts) == 1 else torch.stack(tuple(parts)).prod(0)


def estimate_importance(weight: Tensor) -> Tensor:
    """float32 [K]: the relative mean square of activations per column, estimated from a weight [N, K] that reads them.

    The reciprocal of the column's relative mean square: columns with small weights tend to read large activations
    (measured in docs/numerics.md). This does not hold for an embedding, which has activations as rows, or for a head,
    which often shares that weight: all their columns get importance 1.
    """
    weight = weight.detach()
    if weight.shape[0] >= _ROWS_OF_A_TABLE * weight.shape[1]:
        return torch.ones(weight.shape[1], dtype=torch.float32, device=weight.device)
    return _relative_squares(weight, 0).reciprocal_()


def _relative_squares(weight: Tensor, dim: int) -> Tensor:
    """Mean squares along a dimension, relative to their mean, plus a small constant; strides do not change the bits."""
    weight = weight.float() if weight.dtype == torch.float64 else weight
    if dim == 0 and weight.device.type == "cpu":
        squares = _column_squares(weight)
    else:  # contiguous: torch sums a transposed or sliced weight in another order
        squares = torch.linalg.vector_norm(weight.contiguous(), dim=dim, dtype=torch.float32).square_()
    mean = squares.mean().clamp_(min=torch.finfo(torch.float32).tiny)
    relative: Tensor = squares.div_(mean).add_(_LEAST_MEAN_SQUARE)
    return relative


def _column_squares(weight: Tensor) -> Tensor:
    """float32 [K]: sums of squares of each column; up to ``SERIAL_VALUES`` columns on the calling thread.

    For contiguous rows it takes an eighth of the time of torch's reduction on two threads.
    """
    rows = max(1, SERIAL_VALUES // weight.shape[1])
    sums = weight.new_zeros(min(rows, weight.shape[0]), weight.shape[1], dtype=torch.float32)
    for values in weight.split(rows):
        values = values.float().contiguous()
        sums[: values.shape[0]].addcmul_(values, values)
    return sums.sum(0)


def checked_importance(importance: Tensor, weight: Tensor, name: str) -> Tensor:
    k = weight.shape[1]
    usable = importance.is_floating_point() and importance.shape == (k,)
    if usable:
        importance = importance.detach().to(weight.device, torch.float32).contiguous()
        usable = bool((importance.isfinite() & (importance >= 0)).all())
    if not usable:
        raise ValueError(
            f"{name}: importance must be of shape [{k}] in a float dtype, finite and not negative, for a weight "
            f"{list(weight.shape)}, not {importance.dtype}{list(importance.shape)}"
        )
    return importance
