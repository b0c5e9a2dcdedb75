"""How much each column of a weight matters, where no activations were measured: an estimate by weights alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.serial import SERIAL_VALUES

_ROWS_OF_A_TABLE = 16  # times its columns: heads and embeddings have as many, layers inside a model have not
_LEAST_MEAN_SQUARE = 1e-4  # of a column or row, over that of the weight: no estimate of importance goes further
# Layers whose importance other weights tell, by their names beside each other (measured on SmolLM2, docs/numerics.md).
# Of those behind a norm, the one whose columns tell the size of what all of them read, which may be their own. The
# columns of queries, keys and gates follow their activations much less.
_READ_BY = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "v_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "up_proj"),
    **dict.fromkeys(("query", "key", "value"), "value"),
    **dict.fromkeys(("q_lin", "k_lin", "v_lin"), "v_lin"),
    **dict.fromkeys(("w1", "w3"), "w3"),
    **dict.fromkeys(("wi_0", "wi_1"), "wi_1"),
}
# Of what reads act(gate) * up, the two layers whose rows tell.
_MADE_BY = {"down_proj": ("gate_proj", "up_proj"), "w2": ("w1", "w3"), "wo": ("wi_0", "wi_1")}
# Activations behind norms differ more than the columns of what reads them: by this power.
_POWER_BEHIND_NORMS = 1.5


def told_by(name: str) -> tuple[str, ...]:
    """Of a layer, the names of those whose weights tell how large the activations are that it reads; none: nobody."""
    parent, dot, own = name.rpartition(".")
    others = _MADE_BY.get(own) or ((_READ_BY[own],) if own in _READ_BY else ())
    return tuple(f"{parent}{dot}{other}" for other in others)


def told_part(weight: Tensor, name: str) -> Tensor:
    """float32: what the weight of one of ``told_by(name)`` tells of the layer ``name``, for ``told_importance``."""
    if name.rpartition(".")[2] in _MADE_BY:
        return _relative_squares(weight.detach(), 1)
    return estimate_importance(weight).pow_(_POWER_BEHIND_NORMS)


def told_importance(parts: Sequence[Tensor], k: int) -> Tensor | None:
    """float32 [k], as ``estimate_importance``, from a ``told_part`` of each that tells; None where these do not fit."""
    if not parts or any(part.shape[0] != k for part in parts):
        return None
    return parts[0] if len(parts) == 1 else torch.stack(tuple(parts)).prod(0)


def estimate_importance(weight: Tensor) -> Tensor:
    """float32 [K]: the mean square of activations by column, as far as a weight [N, K] that reads them tells.

    The reciprocal of the column's mean square, relative to the whole: a guess that columns with small weights
    read large activations, which docs/numerics.md measures. It is none for an embedding, whose rows are activations, or
    for a head, which is often the same weight: their columns count alike.
    """
    weight = weight.detach()
    if weight.shape[0] >= _ROWS_OF_A_TABLE * weight.shape[1]:
        return torch.ones(weight.shape[1], dtype=torch.float32, device=weight.device)
    return _relative_squares(weight, 0).reciprocal_()


def _relative_squares(weight: Tensor, dim: int) -> Tensor:
    """Mean squares along a dimension, over their own mean, and a little more; the same bits for any strides."""
    weight = weight.float() if weight.dtype == torch.float64 else weight
    if dim == 0 and weight.device.type == "cpu":
        squares = _column_squares(weight)
    else:  # torch takes sums of a transposed or sliced weight in another order
        squares = torch.linalg.vector_norm(weight.contiguous(), dim=dim, dtype=torch.float32).square_()
    mean = squares.mean().clamp_(min=torch.finfo(torch.float32).tiny)
    relative: Tensor = squares.div_(mean).add_(_LEAST_MEAN_SQUARE)
    return relative


def _column_squares(weight: Tensor) -> Tensor:
    """float32 [K]: sums of squares down the columns; of up to ``SERIAL_VALUES`` columns on the calling thread.

    That takes an eighth of the time that two threads take for torch's own reduction where rows lie one after the other.
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
