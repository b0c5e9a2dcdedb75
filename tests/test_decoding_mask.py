"""The mask of one new token over a static cache: equal to transformers' own at every step."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from qao.integrations.huggingface import decoding_mask
from test_compiled_generate import compiled, generate, model_of, quantized  # noqa: F401  # a fixture

transformers = pytest.importorskip("transformers")
from transformers.generation import utils  # noqa: E402

STEPS = 5  # that follow the first of six tokens
UPSTREAM = {"cache_implementation": "static", "max_time": 1000.0}  # a limit that transformers' own loop tests


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """For each step: whether transformers made the mask, and whether what the model gets equals what it would make."""
    upstream, made = inspect.unwrap(utils.create_masks_for_generate), [0]
    seen: list[tuple[bool, bool]] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        made[0] += 1
        return upstream(*args, **kwargs)

    wrapped = decoding_mask.with_decoding_mask(counted)

    def watched(*args: Any, **kwargs: Any) -> Any:
        before = made[0]
        mask, expected = wrapped(*args, **kwargs), upstream(*args, **kwargs)
        pairs = zip(mask.values(), expected.values()) if isinstance(mask, dict) else [(mask, expected)]  # noqa: B905
        seen.append((made[0] > before, all(a is b if a is None else torch.equal(a, b) for a, b in pairs)))
        return mask

    monkeypatch.setattr(watched, "_of_qao", True, raising=False)  # not to be wrapped again
    monkeypatch.setattr(utils, "create_masks_for_generate", watched)
    return seen


@pytest.mark.parametrize("options", [{}, {"batch": 4}, {"num_beams": 2}], ids=["one", "padded", "beams"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "mistral"])
def test_masks_of_every_step(
    name: str,
    options: dict[str, Any],
    compiled: list[dict[str, Any]],  # noqa: F811
    calls: list[tuple[bool, bool]],
    device: str,
) -> None:
    model = quantized(name, device)
    expected = generate(model, **options)
    assert torch.equal(generate(model, **options, **UPSTREAM), expected)
    assert all(equal for _, equal in calls)
    if "num_beams" in options:  # not compiled by every version
        return
    window = name in ("gpt_oss", "mistral")
    assert [made for made, _ in calls[-STEPS:]] == [True] + [window] * (STEPS - 1)


def test_a_second_sequence_in_the_same_cache(
    compiled: list[dict[str, Any]],  # noqa: F811
    calls: list[tuple[bool, bool]],
) -> None:
    """Its mask has zeros where the first, longer sequence had ones."""
    model = quantized("llama", "cpu")
    cache = transformers.StaticCache(config=model.config, max_cache_len=24)
    for tokens in (12, 5):
        with torch.inference_mode():
            cache.reset()
        generate(model, past_key_values=cache, max_new_tokens=tokens, max_time=1000.0)
    assert all(equal for _, equal in calls)
    assert [made for made, _ in calls].count(True) == 3  # two prompts, and the first step


def test_a_float_model_keeps_the_masks_of_transformers(
    compiled: list[dict[str, Any]],  # noqa: F811
    calls: list[tuple[bool, bool]],
) -> None:
    generate(quantized("llama", "cpu"), **UPSTREAM)
    calls.clear()
    generate(model_of("llama", "cpu"), **UPSTREAM)
    assert calls and all(made for made, _ in calls)
