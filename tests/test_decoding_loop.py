"""The decoding loop of ``generate()`` with a static cache: transformers' tokens, and its own loop for other options.

As in test_compiled_generate.py, steps are not compiled on a CPU, unless the test says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import qao
import torch
from qao.integrations.huggingface import decoding_loop, loop_masks
from test_compile_schemes import fresh_dynamo  # noqa: F401  # a fixture of every test
from test_compiled_generate import (  # noqa: F401
    EXPERTS,
    HEADS,
    SIZES,
    SLIDING,
    TOKENS,
    Streamed,
    compiled,
    generate,
    model_of,
    quantized,
)
from torch import Tensor
from torch._dynamo.utils import counters

transformers = pytest.importorskip("transformers")
from transformers.generation import utils  # noqa: E402

STATIC = {"cache_implementation": "static"}
PROMPT = 9  # tokens


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of steps of every loop that took over."""
    runs: list[int] = []

    def watched(upstream: Any) -> Any:
        def _run(self: Any, buffers: Any, step: Any) -> Tensor:
            runs.append(0)

            def counted() -> Any:
                runs[-1] += 1
                return step()

            return upstream(self, buffers, counted)

        return _run

    monkeypatch.setattr(decoding_loop.Loop, "_run", watched(decoding_loop.Loop._run))
    return runs


@contextmanager
def loop_of_transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(utils.GenerationMixin, "_sample", inspect.unwrap(utils.GenerationMixin._sample))
        yield


def of_transformers(monkeypatch: pytest.MonkeyPatch, model: Any, **options: Any) -> Any:
    """The result of transformers' own loop with a static cache, and what a streamer got."""
    with loop_of_transformers(monkeypatch):
        return generate(model, **{**STATIC, **options})


@pytest.fixture(autouse=True)
def on_gpu_and_cpu(request: pytest.FixtureRequest) -> None:
    """What a CPU would compile only on request; a GPU compiles everything."""
    if "device" not in request.fixturenames or request.getfixturevalue("device") == "cpu":
        request.getfixturevalue("compiled")


def ends_of(model: Any, batch: int, at: tuple[int, ...]) -> list[int]:
    """For each row of a batch, the token that it has at this step."""
    rows = generate(model, batch=batch, max_new_tokens=max(at) + 1)
    return [int(rows[row, PROMPT + step]) for row, step in enumerate(at)]


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "padded": {"batch": 4},
    "a longer answer": {"max_new_tokens": 20},
    "two tokens": {"max_new_tokens": 2},
    "no mask": {"attention_mask": None},
    "sampled": {"do_sample": True},
    "sampled with options": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "batch": 3},
    "repetition": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "batch": 3, "max_new_tokens": 12},
    "several answers": {"do_sample": True, "num_return_sequences": 3},
    "a bias": {"sequence_bias": {(5,): 4.0, (6,): -4.0}},
}


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("way", OPTIONS)
def test_tokens_of_transformers(
    name: str, way: str, taken: list[int], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    model, options = quantized(name, device), OPTIONS[way]
    results = []
    for run in (of_transformers, lambda _, model, **options: generate(model, **STATIC, **options)):
        torch.manual_seed(3)
        results.append(run(monkeypatch, model, **options))
    assert torch.equal(*results) and results[0].shape[1] > PROMPT + 1
    assert taken == [results[0].shape[1] - PROMPT - 1]


def test_a_prompt_of_embeddings(taken: list[int], device: str) -> None:
    model = quantized("llama", device)
    embeddings = model.get_input_embeddings()(torch.arange(20, 29, device=device)[None]).detach()
    given = {"attention_mask": torch.ones(1, PROMPT, dtype=torch.int64, device=device), "max_new_tokens": 6}
    found, expected = (model.generate(inputs_embeds=embeddings, **given, **more) for more in (STATIC, {}))
    assert torch.equal(found, expected) and found.shape == (1, 6) and taken == [5]


ENDS: dict[str, tuple[int, ...]] = {
    "in the first step": (0, 0, 0),
    "one row in the first step": (0, 3, 6),
    "together": (4, 4, 4),
    "in reverse": (6, 2, 1),
    "only some": (2, 5),
    "in the last step": (9, 9, 9),
}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("case", ENDS)
def test_sequences_that_end(
    case: str, sampled: bool, taken: list[int], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    model = quantized("llama", device)
    ends = ends_of(model, 3, ENDS[case])
    options: dict[str, Any] = {"batch": 3, "eos_token_id": ends, "max_new_tokens": 10}
    if sampled:
        options |= {"do_sample": True, "temperature": 0.2}
    results = []
    for run in (of_transformers, lambda _, model, **options: generate(model, **STATIC, **options)):
        torch.manual_seed(3)
        results.append(run(monkeypatch, model, **options))
    assert torch.equal(*results)
    made = results[0].shape[1] - PROMPT
    assert taken == ([] if made == 1 else [min(made + 1, 9)])  # two steps behind the end at most


@pytest.mark.parametrize("end", [None, 0, 3, 9])
def test_a_streamer(end: int | None, taken: list[int], monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    model, ours, theirs = quantized("llama", device), Streamed(), Streamed()
    tokens = None if end is None else ends_of(model, 1, (end,))
    options: dict[str, Any] = {"eos_token_id": tokens, "max_new_tokens": 10}
    expected = of_transformers(monkeypatch, model, streamer=theirs, **options)
    assert torch.equal(generate(model, streamer=ours, **STATIC, **options), expected)
    assert ours.tokens == theirs.tokens == expected[0].tolist() and ours.ended
    assert len(taken) == (end != 0)


def test_calls_of_other_shapes(taken: list[int], monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Buffers of one call serve the next with the same shapes, and nothing of the former is left."""
    model = quantized("llama", device)
    ends = ends_of(model, 2, (2, 3))
    cases: list[dict[str, Any]] = [
        {"max_new_tokens": 16},
        {"max_new_tokens": 5},
        {"batch": 2, "eos_token_id": ends},
        {"batch": 2},
        {"batch": 2, "eos_token_id": ends[:1]},
        {"max_new_tokens": 30},
    ]
    for case in cases:
        assert torch.equal(generate(model, **STATIC, **case), of_transformers(monkeypatch, model, **case))
    assert len(taken) == len(cases)


def test_a_cache_of_the_caller(taken: list[int], device: str) -> None:
    """It holds the tokens of transformers' loop, and then goes on with a second answer."""
    model = quantized("llama", device)
    ends = ends_of(model, 1, (3,))
    for options, loops in (({}, 1), ({"eos_token_id": ends}, 0)):
        taken.clear()
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        found = generate(model, past_key_values=cache, **options)
        assert int(cache.get_seq_length()) == found.shape[1] - 1
        assert torch.equal(found, generate(model, **options))
        assert len(taken) == loops


class Custom(transformers.LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(1, -1)


class Stop(transformers.StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] > PROMPT + 3, device=input_ids.device)


OTHERS: dict[str, dict[str, Any]] = {
    "a returned dictionary": {"return_dict_in_generate": True, "output_scores": True},
    "a logits processor of the caller": {"logits_processor": [Custom()]},
    "a stopping criterion of the caller": {"stopping_criteria": [Stop()]},
    "a time limit": {"max_time": 1000.0},
    "chunks of the prompt": {"prefill_chunk_size": 4},
    "too many ends": {"eos_token_id": list(range(70, 90))},
    "no cache": {"cache_implementation": None, "use_cache": False},
    "a growing cache": {"cache_implementation": "dynamic"},
    "beams": {"num_beams": 2},
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_options_keep_the_loop_of_transformers(
    case: str, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = quantized("llama", "cpu"), {**STATIC, **OTHERS[case]}
    if case == "a growing cache":
        monkeypatch.setattr(utils.GenerationMixin, "_valid_auto_compile_criteria", lambda *args: False)
    found, expected = generate(model, **options), of_transformers(monkeypatch, model, **options)
    if "return_dict_in_generate" in options:
        assert len(found.scores) == len(expected.scores)
        found, expected = found.sequences, expected.sequences
    assert torch.equal(found, expected) and not taken


WINDOWED = ["gpt_oss", "mistral", "gemma3_text"]


@pytest.mark.parametrize("window", [4, PROMPT - 1, PROMPT, PROMPT + 1, PROMPT + 3, 64])
@pytest.mark.parametrize("name", WINDOWED)
def test_windows(name: str, window: int, taken: list[int], monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Shorter than the prompt, filled by the answer, and never filled; the second answer begins with a used cache."""
    model = quantized(name, device, sliding_window=window)
    for options in ({"max_new_tokens": 14}, {"batch": 4, "max_new_tokens": 14}, {"max_new_tokens": 7}):
        found, expected = generate(model, **STATIC, **options), of_transformers(monkeypatch, model, **options)
        assert found.tolist() == expected.tolist(), options
    assert taken == [13, 13, 6]


STATES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32},
    "olmo_hybrid": {"head_dim": 16},
}
STATE = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}


@pytest.mark.parametrize("name", STATES)
def test_layers_with_a_state(name: str, taken: list[int], monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Linear attention: its mask is None, and steps behind the end of one answer do not change the next."""
    if not hasattr(transformers.cache_utils, "LinearAttentionLayer"):
        pytest.skip("this version of transformers has no static cache for linear attention")
    sizes = {**STATE, **STATES[name], "layer_types": ["linear_attention", "full_attention"]}
    model = quantized(name, device, **sizes)
    ends = ends_of(model, 3, (2, 3, 1))
    for options in ({"batch": 3, "eos_token_id": ends}, {"max_new_tokens": 9}, {"batch": 3}):
        assert torch.equal(generate(model, **STATIC, **options), of_transformers(monkeypatch, model, **options))
    assert len(taken) == 3


def test_a_method_that_changes_later_steps(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3 computes its cache again behind as many tokens as the configuration names."""
    for longest in (PROMPT + 6, PROMPT + 5):
        model = quantized("phi3", "cpu", original_max_position_embeddings=longest)
        assert torch.equal(generate(model, **STATIC), of_transformers(monkeypatch, model))
    assert taken == [5]


TEXT = {**SIZES, **HEADS, **TOKENS, "head_dim": 16}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_attention_heads": 2, "image_size": 28}
VISION |= {"patch_size": 14, "num_hidden_layers": 1, "depth": 1, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**TEXT, **SLIDING, "query_pre_attn_scalar": 16},
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        **{"mm_tokens_per_image": 4, "image_token_index": 95, "boi_token_index": 94, "eoi_token_index": 93},
    },
    "qwen3_vl": {
        "text_config": {
            **TEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        },
        "vision_config": {**VISION, "num_position_embeddings": 16},
        **{"image_token_id": 95, "vision_start_token_id": 94, "vision_end_token_id": 93, "video_token_id": 92},
    },
}


@pytest.mark.parametrize("name", IMAGES)
def test_models_of_images(name: str, taken: list[int], monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """An image counts in the prompt alone; positions may have several rows."""
    if not hasattr(transformers.GenerationMixin, "create_masks_for_generate"):
        pytest.skip("in this version of transformers most of these models override methods of generate()")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **IMAGES[name])
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval().to(device)
    qao.quantize_(model, qao.Int8WeightOnly(), progress=False)
    ids = torch.randint(2, 90, (1, 12), device=device)
    ids[0, 2:8] = torch.tensor([94, 95, 95, 95, 95, 93])
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 10}
    if name == "gemma3":
        given |= {"token_type_ids": (ids == 95).long(), "pixel_values": torch.randn(1, 3, 28, 28, device=device)}
    found = model.generate(do_sample=False, **STATIC, **given)
    with loop_of_transformers(monkeypatch):
        assert torch.equal(model.generate(do_sample=False, **STATIC, **given), found)
    assert taken == [9]


def test_windows_without_a_mask(taken: list[int], monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    model, options = quantized("mistral", device), {"attention_mask": None, "max_new_tokens": 9}
    assert torch.equal(generate(model, **STATIC, **options), of_transformers(monkeypatch, model, **options))
    assert taken == [8]


def test_a_window_in_a_cache_of_the_caller_keeps_its_order(taken: list[int]) -> None:
    model = quantized("gemma3_text", "cpu")
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    assert torch.equal(generate(model, past_key_values=cache), generate(model)) and not taken


def test_unknown_layers_keep_the_loop_of_transformers(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("gemma3_text", "cpu")
    expected = generate(model)
    for module, name, found in ((decoding_loop, "types_of", {"other"}), (loop_masks, "sliding_layers", [])):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda _, found=found: found)
            assert torch.equal(generate(model, **STATIC), expected)
    assert not taken


def test_other_methods_keep_the_loop_of_transformers(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("llama", "cpu")
    expected = generate(model)
    prepare = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: prepare(*args, **kwargs)  # as PEFT does it
    assert torch.equal(generate(model, **STATIC), expected) and not taken
    del model.prepare_inputs_for_generation

    class Other(type(model)):  # type: ignore[misc]
        def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
            return super()._update_model_kwargs_for_generation(*args, **kwargs)

    model.__class__ = Other
    assert torch.equal(generate(model, **STATIC), expected) and not taken


def test_arguments_of_the_step_that_the_loop_does_not_know(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("llama", "cpu")
    expected = generate(model)
    monkeypatch.setattr(decoding_loop, "_PLAIN", {type(None)})  # "use_cache" is a bool
    assert torch.equal(generate(model, **STATIC), expected) and not taken


def test_a_float_model_keeps_the_loop_of_transformers(taken: list[int]) -> None:
    model = model_of("llama", "cpu")
    assert torch.equal(generate(model, **STATIC), generate(model)) and not taken


def test_an_error_of_a_streamer_is_raised(device: str) -> None:
    class Broken(Streamed):
        def put(self, tokens: Tensor) -> None:
            super().put(tokens)
            if len(self.tokens) > PROMPT + 2:
                raise RuntimeError("broken")

    model = quantized("llama", device)
    expected = generate(model)
    with pytest.raises(RuntimeError, match="broken"):
        generate(model, streamer=Broken(), **STATIC)
    assert decoding_loop.waiting() is None and torch.equal(generate(model, **STATIC), expected)


def test_threads_have_buffers_of_their_own(device: str) -> None:
    """One streamer generates with the same model between two of its tokens."""
    model = quantized("llama", device)
    expected, longer = generate(model), generate(model, max_new_tokens=9)

    class Nested(Streamed):
        def put(self, tokens: Tensor) -> None:
            super().put(tokens)
            if len(self.tokens) == PROMPT + 3:
                assert torch.equal(generate(model, **STATIC), expected)

    assert torch.equal(generate(model, streamer=Nested(), max_new_tokens=9, **STATIC), longer)
    assert torch.equal(generate(model, **STATIC), expected)


def test_the_stop_check_of_transformers_is_not_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold back the first token of a streamer."""
    if not hasattr(utils, "DeferredStopCheck"):
        pytest.skip("this version of transformers has no deferred stop check")
    seen: list[bool] = []
    upstream = utils.DeferredStopCheck.is_supported

    def asked(device: torch.device, *args: Any, **kwargs: Any) -> bool:
        seen.append(upstream(torch.device("cuda"), *args, **kwargs))
        return False

    monkeypatch.setattr(asked, "_of_qao", True, raising=False)
    monkeypatch.setattr(utils.DeferredStopCheck, "is_supported", staticmethod(asked))
    model = quantized("llama", "cpu")
    generate(model, **STATIC)
    generate(model, max_time=1000.0, **STATIC)
    assert seen == [False, True]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral"])
def test_one_graph_serves_every_option(name: str, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    model = quantized(name, device)
    monkeypatch.undo()  # compile
    options: dict[str, Any] = {"batch": 2, "max_new_tokens": 10, **STATIC}
    if device == "cpu":
        config = transformers.CompileConfig(backend="qao", mode="default")
        config._compile_all_devices = True
        options["compile_config"] = config
    ends = ends_of(model, 2, (3, 4))
    for case in ({}, {"eos_token_id": ends}, {"do_sample": True, "top_k": 1}, {"max_new_tokens": 7}):
        case = {**options, **case}
        expected = generate(model, **{**case, "cache_implementation": None, "compile_config": None})
        assert torch.equal(generate(model, **case), expected)
        assert counters["stats"]["unique_graphs"] == 1
