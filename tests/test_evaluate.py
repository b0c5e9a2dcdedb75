"""Perplexity and paired differences."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from qao import Int4WeightOnly, quantize_
from qao.diagnostics.perplexity import Comparison, Evaluation, compare, perplexity
from torch import Tensor, nn

VOCAB = 40


class Bigrams(nn.Module):
    """Logits of the next token from a table [V, V]; like transformers, or a plain tensor."""

    def __init__(self, wraps: bool = False) -> None:
        super().__init__()
        self.embedding, self.head, self.wraps = nn.Embedding(VOCAB, 64), nn.Linear(64, VOCAB), wraps

    def forward(self, ids: Tensor) -> Any:
        logits = self.head(self.embedding(ids))
        return SimpleNamespace(logits=logits) if self.wraps else logits


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (101,), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> Bigrams:
    torch.manual_seed(0)
    return Bigrams().eval()


@pytest.mark.parametrize("window", [1, 7, 50, 100, 512])
@pytest.mark.parametrize("wraps", [False, True])
def test_perplexity(model: Bigrams, tokens: Tensor, window: int, wraps: bool, device: str) -> None:
    """Every token but the first is predicted once, whatever the window; this model only sees one previous token."""
    model.wraps = wraps
    log_p = model.double()(tokens).logits if wraps else model.double()(tokens)
    expected = -log_p.log_softmax(-1)[torch.arange(100), tokens[1:]]
    result = perplexity(model.float().to(device), tokens, window=window, num_bytes=250)
    assert result.window_tokens == tuple(min(window, 100 - begin) for begin in range(0, 100, window))
    assert result.window_nats == pytest.approx([part.sum().item() for part in expected.split(window)], rel=1e-5)
    assert result.nats_per_token == pytest.approx(expected.mean().item(), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(expected.mean().item()), rel=1e-4)
    assert result.bits_per_byte == pytest.approx(expected.sum().item() / math.log(2) / 250, rel=1e-5)
    assert perplexity(model, tokens.tolist(), window=window).bits_per_byte is None


def test_windows_see_no_further_than_themselves(tokens: Tensor) -> None:
    seen = []

    class Recorder(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            seen.append(ids)
            return torch.zeros(*ids.shape, VOCAB)

    result = perplexity(Recorder().eval(), tokens, window=30)
    assert torch.equal(torch.cat(seen, 1)[0], tokens[:-1])
    assert [ids.shape[1] for ids in seen] == [30, 30, 30, 10]
    assert result.perplexity == pytest.approx(VOCAB)


def test_compare() -> None:
    """Windows of one length: the mean of the differences, and the standard error of that mean."""
    reference = Evaluation((300.0, 500.0, 100.0, 420.0), (100,) * 4, 1600)
    other = Evaluation((310.0, 505.0, 103.0, 432.0), (100,) * 4, 1600)
    differences = [0.10, 0.05, 0.03, 0.12]
    result = compare(other, reference)
    assert result.nats_per_token == pytest.approx(statistics.mean(differences))
    assert result.standard_error == pytest.approx(statistics.stdev(differences) / 2)
    bits = other.bits_per_byte, reference.bits_per_byte
    assert bits[0] is not None and bits[1] is not None
    assert result.bits_per_byte == pytest.approx(bits[0] - bits[1])
    assert result.bits_standard_error == pytest.approx(result.standard_error * 400 / 1600 / math.log(2))
    assert str(result) == "+0.0750 ± 0.0210 nats per token"
    assert compare(reference, reference) == Comparison(0, 0, 0, 0)


def test_compare_without_bytes_or_with_one_window() -> None:
    result = compare(Evaluation((12.0,), (10,)), Evaluation((10.0,), (10,)))
    assert result.nats_per_token == pytest.approx(0.2) and math.isnan(result.standard_error)
    assert result.bits_per_byte is None and result.bits_standard_error is None


def test_short_last_window_counts_by_its_tokens() -> None:
    """A model that is worse by the same amount on every token has no standard error."""
    reference = Evaluation((30.0, 20.0, 7.0), (10, 10, 3))
    worse = Evaluation((31.0, 21.0, 7.3), (10, 10, 3))
    assert compare(worse, reference).nats_per_token == pytest.approx(0.1)
    assert compare(worse, reference).standard_error == pytest.approx(0, abs=1e-12)


def test_quantized_model(model: Bigrams, tokens: Tensor) -> None:
    reference = perplexity(model, tokens, window=10)
    quantize_(model, Int4WeightOnly(group_size=32), progress=False)
    result = compare(perplexity(model, tokens, window=10), reference)
    assert 0 < abs(result.nats_per_token) < 0.1 and 0 < result.standard_error < 0.05


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"tokens": [3]}, "two or more"),
        ({"tokens": [3, -100, 4]}, "ids >= 0"),
        ({"tokens": [3, 4], "window": 0}, "at least 1"),
        ({"tokens": [3, 4], "num_bytes": 0}, "at least 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str, model: Bigrams) -> None:
    with pytest.raises(ValueError, match=message):
        perplexity(model, **arguments)


def test_bad_models(model: Bigrams) -> None:
    with pytest.raises(ValueError, match="training mode"):
        perplexity(model.train(), [1, 2])
    with pytest.raises(ValueError, match=r"logits \[1, 1, V\], not \[1, 1\]"):
        perplexity(nn.Identity().eval(), [1, 2])
    with pytest.raises(ValueError, match="same tokens and windows"):
        compare(Evaluation((1.0,), (3,)), Evaluation((1.0,), (4,)))
