"""How much each column of a weight matters, where no activations were measured: an estimate by weights alone."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS_OF_A_TABLE = 16  # times its columns: heads and embeddings have as many, layers inside a model have not
_LEAST_MEAN_SQUARE = 1e-4  # of a column, over that of the weight: no estimate of its importance goes further
# Of layers that read one activation, by their names beside each other, the one whose weight tells its size. The columns
# of queries, keys and gates follow their activations much less (measured on SmolLM2).
_TOLD_BY = {
    "q_proj": "v_proj",
    "k_proj": "v_proj",
    "gate_proj": "up_proj",
    "query": "value",
    "key": "value",
    "q_lin": "v_lin",
    "k_lin": "v_lin",
    "w1": "w3",
    "wi_0": "wi_1",
}


def told_by(name: str) -> str | None:
    """Of a layer, the name of the one beside it whose weight tells how large the activations are that both read."""
    parent, dot, own = name.rpartition(".")
    other = _TOLD_BY.get(own)
    return None if other is None else f"{parent}{dot}{other}"


def estimate_importance(weight: Tensor) -> Tensor:
    """float32 [K]: the mean square of activations by column, as far as a weight [N, K] that reads them tells.

    The reciprocal of the column's mean square, relative to the whole: a guess that columns with small weights
    read large activations, which docs/numerics.md measures. It is none for an embedding, whose rows are activations, or
    for a head, which is often the same weight: their columns count alike.
    """
    weight = weight.detach()
    if weight.shape[0] >= _ROWS_OF_A_TABLE * weight.shape[1]:
        return torch.ones(weight.shape[1], dtype=torch.float32, device=weight.device)
    weight = weight.float() if weight.dtype == torch.float64 else weight
    squares = torch.linalg.vector_norm(weight, dim=0, dtype=torch.float32).square_()
    mean = squares.mean().clamp_(min=torch.finfo(torch.float32).tiny)
    importance: Tensor = squares.div_(mean).add_(_LEAST_MEAN_SQUARE).reciprocal_()
    return importance


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
