"""Perplexity and Kullback-Leibler divergence of a model's predictions, compared with those of a reference."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from qao.diagnostics.perplexity import divergence, log_probabilities, mean_and_error
from torch import Tensor, nn

_KEPT_BYTES = 2 << 30


class Reference:
    """Log-probabilities of the reference. Those of the first windows stay in memory."""

    def __init__(self, model: nn.Module, pieces: list[Tensor]) -> None:
        self.model, self.pieces = model, pieces
        self._kept: list[Tensor] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index, piece in enumerate(self.pieces):
            if index < len(self._kept):
                yield piece, self._kept[index]
                continue
            found = log_probabilities(self.model, piece)
            if index == len(self._kept) and (index + 1) * found.nbytes <= _KEPT_BYTES:
                self._kept.append(found)
            yield piece, found


@torch.no_grad()
def compared(model: nn.Module, reference: Reference) -> dict[str, float]:
    """Perplexity, and differences from the reference with their standard errors over windows."""
    nats, rises, divergences, same = [], [], [], 0
    for piece, exact in reference:
        found = exact if model is reference.model else log_probabilities(model, piece)
        distance, rise = divergence(found, exact, piece)
        nats.append(-found.gather(1, piece[1:, None]).sum(dtype=torch.float64).item())
        divergences.append(distance)
        rises.append(rise)
        same += int((found.argmax(-1) == exact.argmax(-1)).sum())
    counts = [len(piece) - 1 for piece in reference.pieces]
    above, above_error = mean_and_error(rises, counts)
    distance, distance_error = mean_and_error(divergences, counts)
    return {
        "perplexity": math.exp(math.fsum(nats) / sum(counts)),
        **{"nats_above": above, "nats_error": above_error},
        **{"divergence": distance, "divergence_error": distance_error},
        "same_top": same / sum(counts),
    }
