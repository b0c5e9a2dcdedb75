"""Perplexity of a causal language model on a text, and paired differences between two models.

    reference = qao.diagnostics.perplexity.perplexity(model, tokens)
    qao.quantize_(model, qao.Int4WeightOnly())
    print(qao.diagnostics.perplexity.compare(qao.diagnostics.perplexity.perplexity(model, tokens), reference))

The text is split into windows that are predicted independently. Windows differ far more than models do, so two models
are compared window by window on the same text. The standard error of the difference is then a small fraction of the
standard error of either perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Comparison", "Evaluation", "compare", "perplexity"]


@dataclass(frozen=True)
class Evaluation:
    """Predictions of a model on a text.

    Attributes:
        window_nats: per window, the sum over its predicted tokens of -ln p(token).
        window_tokens: number of predicted tokens per window.
        num_bytes: length of the text in UTF-8, if given.
    """

    window_nats: tuple[float, ...]
    window_tokens: tuple[int, ...]
    num_bytes: int | None = None

    @property
    def nats_per_token(self) -> float:
        return math.fsum(self.window_nats) / sum(self.window_tokens)

    @property
    def perplexity(self) -> float:
        """exp(nats_per_token); depends on the tokenizer."""
        return math.exp(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers; None if the length of the text is unknown."""
        return None if self.num_bytes is None else math.fsum(self.window_nats) / math.log(2) / self.num_bytes


@dataclass(frozen=True)
class Comparison:
    """Difference between a model and a reference on the same text. Negative is better.

    Attributes:
        nats_per_token: difference of the means.
        standard_error: its standard error over windows; NaN for a single window.
        bits_per_byte, bits_standard_error: the same in bits per byte; None if the length of the text is unknown.
    """

    nats_per_token: float
    standard_error: float
    bits_per_byte: float | None = None
    bits_standard_error: float | None = None

    def __str__(self) -> str:
        return f"{self.nats_per_token:+.4f} ± {self.standard_error:.4f} nats per token"


def perplexity(
    model: nn.Module, tokens: Sequence[int] | Tensor, *, window: int = 512, num_bytes: int | None = None
) -> Evaluation:
    """Evaluate a causal language model on a text.

    Args:
        model: called with ids int64 [1, T], returns logits [1, T, V], directly or as ``.logits`` (transformers). It
            must be in evaluation mode.
        tokens: the text, at least two tokens. All but the first are predicted, each once.
        window: number of tokens predicted per window; the last window may be shorter. A token attends to earlier tokens
            in its window and to the token before the window.
        num_bytes: length of the text in UTF-8 without the first token, for bits per byte.

    Raises:
        ValueError: fewer than two tokens, a negative id, a window or length below 1, a model in training mode, or
            logits that are not [1, T, V].
    """
    if num_bytes is not None and num_bytes < 1:
        raise ValueError(f"perplexity: num_bytes must be at least 1, not {num_bytes}")
    nats, counts = [], []
    with torch.no_grad():  # unlike inference_mode, leaves cached tensors of the model usable in training
        for seen in windows(model, tokens, window):
            logits = _logits(model, seen)
            nats.append(functional.cross_entropy(logits, seen[1:], reduction="none").double().sum().item())
            counts.append(seen.numel() - 1)
    return Evaluation(tuple(nats), tuple(counts), num_bytes)


def windows(model: nn.Module, tokens: Sequence[int] | Tensor, window: int) -> list[Tensor]:
    """Ids [T + 1] per window on the device of the model; T tokens are predicted. Raises as ``perplexity``."""
    ids = torch.as_tensor(tokens, dtype=torch.int64, device=None if isinstance(tokens, Tensor) else "cpu").reshape(-1)
    if ids.numel() < 2 or int(ids.min()) < 0:
        raise ValueError(f"perplexity: tokens must be two or more ids >= 0, not {ids.numel()}: {ids[:8].tolist()}")
    if window < 1:
        raise ValueError(f"perplexity: window must be at least 1, not {window}")
    if model.training:
        raise ValueError("perplexity: the model is in training mode, where dropout may be random. Call model.eval()")
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    return [ids[begin : begin + window + 1].to(device) for begin in range(0, ids.numel() - 1, window)]


def log_probabilities(model: nn.Module, seen: Tensor) -> Tensor:
    """float32 [T, V]: log-probabilities of the token after each of the first T tokens of a window."""
    return _logits(model, seen).log_softmax(-1)


def divergence(found: Tensor, exact: Tensor, piece: Tensor) -> tuple[float, float]:
    """Sums over the tokens of a window: the Kullback-Leibler divergence, and the increase of -ln p(token)."""
    # A term with p = 0 is 0, even where ln p is -inf.
    terms = torch.where(exact > -torch.inf, exact.exp() * (exact - found), 0)
    chosen = piece[1:, None]
    rise = (exact.gather(1, chosen) - found.gather(1, chosen)).sum(dtype=torch.float64)
    return terms.sum(dtype=torch.float64).item(), rise.item()


def _logits(model: nn.Module, seen: Tensor) -> Tensor:
    output: Any = model(seen[None, :-1])
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != (1, seen.numel() - 1):
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"perplexity: the model must give logits [1, {seen.numel() - 1}, V], not {shape}")
    return logits[0].float()


def compare(evaluation: Evaluation, reference: Evaluation) -> Comparison:
    """Difference between two models on the same text, with its paired standard error.

    Raises:
        ValueError: the two were measured with different windows, or on texts of different length.
    """
    if (evaluation.window_tokens, evaluation.num_bytes) != (reference.window_tokens, reference.num_bytes):
        raise ValueError("compare: both evaluations must use the same tokens and windows")
    differences = [a - b for a, b in zip(evaluation.window_nats, reference.window_nats, strict=True)]
    mean, error = mean_and_error(differences, reference.window_tokens)
    if reference.num_bytes is None:
        return Comparison(mean, error)
    bits = sum(reference.window_tokens) / math.log(2) / reference.num_bytes
    return Comparison(mean, error, mean * bits, error * bits)


def mean_and_error(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """Mean per token of per-window sums, and its standard error over windows; NaN for a single window."""
    tokens, number = sum(counts), len(counts)
    mean = math.fsum(sums) / tokens
    # Standard error of a ratio of sums: the last window may be shorter.
    rest = math.fsum((one - mean * count) ** 2 for one, count in zip(sums, counts, strict=True))
    return mean, math.sqrt(rest * number / (number - 1)) / tokens if number > 1 else math.nan
