"""``generate()`` with a static cache: backend "qao" without further arguments, and the tokens of the eager model.

transformers compiles by itself on a GPU only; a private switch makes it compile on a CPU. Logits in float32 do not tie.
"""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from qao.integrations.huggingface.compiled_step import CompiledStep
from test_compile_schemes import fresh_dynamo  # noqa: F401  # a fixture of every test
from torch import Tensor
from torch._dynamo.utils import counters

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {**SLIDING, "head_dim": 16, "query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": 6},
    "qwen3": {"head_dim": 16},
    "phi3": {},
    "glm4": {"head_dim": 16},
    "cohere": {},
    "olmo2": {},
    "gpt_oss": {**SLIDING, **EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32},
}


def random_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():  # with the initial values, every token is the same one
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


def model_of(name: str, device: str, **sizes: Any) -> Any:
    sizes = {**SIZES, **HEADS, **TOKENS, **MODELS.get(name, {}), **sizes}
    return random_model(transformers.AutoConfig.for_model(name, **sizes)).to(device)


def quantized(name: str, device: str, **sizes: Any) -> Any:
    model = model_of(name, device, **sizes)
    qao.quantize_(model, qao.Int8WeightOnly(), progress=False)
    return model


def generate(model: Any, batch: int = 1, **options: Any) -> Tensor:
    """Six tokens for prompts of nine tokens. Those after the first are shorter and padded on the left."""
    ids = torch.randint(2, SIZES["vocab_size"], (batch, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        ids[row, : 2 * row], mask[row, : 2 * row] = TOKENS["pad_token_id"], 0
    given = {"attention_mask": mask.to(model.device), "max_new_tokens": 6, "do_sample": False, **options}
    with torch.inference_mode():
        return model.generate(ids.to(model.device), **given)


# ---- the choice of the backend ---------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of ``torch.compile``, which compiles nothing here. transformers calls it as on a GPU."""
    calls: list[dict[str, Any]] = []

    def fake(call: Any, **options: Any) -> Any:
        calls.append(options)
        return call

    monkeypatch.setattr(torch, "compile", fake)
    monkeypatch.setattr(transformers.GenerationMixin, "_valid_auto_compile_criteria", lambda *args: True)
    return calls


def test_longer_sequences_compile_once(compiled: list[dict[str, Any]]) -> None:
    model = quantized("llama", "cpu")
    generate(model, cache_implementation="static")
    count = len(compiled)
    for tokens in (20, 100):
        generate(model, cache_implementation="static", max_new_tokens=tokens)
    assert len(compiled) == count > 0
    generate(model, cache_implementation="static", max_new_tokens=300)  # a cache of 512 instead of 256
    assert len(compiled) > count


def test_quantized_models_get_the_backend(compiled: list[dict[str, Any]], tmp_path: Path) -> None:
    default, own = transformers.CompileConfig().to_dict(), transformers.CompileConfig(backend="eager", dynamic=True)
    model, static = model_of("llama", "cpu"), {"cache_implementation": "static"}
    generate(model, **static)
    qao.quantize_(model, qao.Int8WeightOnly(), progress=False)
    generate(model, **static)
    generate(model, **static, max_new_tokens=3)  # is compiled already
    generate(model, **static, compile_config=own)
    model.save_pretrained(tmp_path)
    generate(qao.from_pretrained(tmp_path), **static)
    generate(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), **static)
    qao.dequantize_(model)
    generate(model, **static)
    options = dict(torch._inductor.list_mode_options(default.pop("mode")))
    options["guard_filter_fn"] = torch.compiler.skip_guard_on_all_nn_modules_unsafe
    ours = {**default, "backend": "qao", "options": options}
    default = transformers.CompileConfig().to_dict()
    assert compiled == [default, ours, own.to_dict(), ours, ours, default]
    assert "compile" not in (tmp_path / "generation_config.json").read_text()


def test_the_first_call_says_what_takes_the_time(
    compiled: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logging = transformers.utils.logging
    model, static = quantized("llama", "cpu"), {"cache_implementation": "static", "max_new_tokens": 2}
    generate(copy.deepcopy(model), **static)  # no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(logging, "is_progress_bar_enabled", lambda: False)
    generate(copy.deepcopy(model), **static)
    assert "qao" not in capsys.readouterr().err
    monkeypatch.setattr(logging, "is_progress_bar_enabled", lambda: True)
    generate(model, **static)
    generate(model, **static)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("qao: "))
    assert "decoding step of LlamaForCausalLM, 15 quantized layers, with backend 'qao'" in line and " s" in line


# ---- modules, which are checked once per call --------------------------------------------------------------------


class Scaled(torch.nn.Module):
    """Two layers, and attributes of the kinds that models have."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.factor, self.names, self.scaling = factor, ["a"], {"a": 1.0}
        self.register_buffer("shift", torch.zeros(4))
        self.config = transformers.LlamaConfig(hidden_size=64)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor * sum(self.scaling[name] for name in self.names) * self.config.hidden_size
        return self.second(self.first(x)) * factor + self.shift


class Eager:
    """A configuration that compiles no code."""

    backend, options = "qao", None

    def to_dict(self) -> dict[str, Any]:
        return {"backend": "eager", "mode": "default", "options": None}


CHANGES: dict[str, Any] = {
    "a number": lambda model: setattr(model, "factor", 5.0),
    "a list": lambda model: model.names.append("a"),
    "a dict": lambda model: model.scaling.update(a=3.0),
    "the configuration": lambda model: setattr(model.config, "hidden_size", 32),
    "a layer": lambda model: setattr(model, "first", torch.nn.Linear(4, 4)),
    "another type of layer": lambda model: setattr(model, "second", torch.nn.Identity()),
    "a parameter": lambda model: setattr(model.first, "weight", torch.nn.Parameter(torch.ones(4, 4))),
    "no bias": lambda model: setattr(model.first, "bias", None),
    "a buffer": lambda model: setattr(model, "shift", torch.ones(4)),
    "gradients": lambda model: model.second.requires_grad_(False),
    "a hook": lambda model: model.first.register_forward_hook(lambda module, given, y: y + 1),
    "a method": lambda model: setattr(model.first, "forward", lambda x: x),
    "training": lambda model: model.second.train(),
    "a dtype": lambda model: model.second.double().register_forward_pre_hook(lambda module, x: x[0].double()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_compiled_again(change: str) -> None:
    model, config, x = Scaled(2.0).eval(), Eager(), torch.randn(3, 4)
    with torch.no_grad():
        step = CompiledStep(model, config)
        assert torch.equal(step(x), model(x)) and step.fits(model, config)
        model.first.weight.mul_(2)  # in place: the graph reads it
        assert torch.equal(step(x), model(x)) and step.fits(model, config)
        CHANGES[change](model)
        assert not step.fits(model, config)
        again = CompiledStep(model, config)
        assert torch.equal(again(x), model(x)) and again.fits(model, config)


def test_models_of_one_class_have_graphs_of_their_own() -> None:
    models, config, x = [Scaled(factor).eval() for factor in (1.0, 7.0)], Eager(), torch.randn(3, 4)
    with torch.no_grad():
        steps = [CompiledStep(model, config) for model in models]
        for _ in range(2):
            assert all(torch.equal(step(x), model(x)) for step, model in zip(steps, models, strict=True))
    assert steps[0].fits(models[0], config) and not steps[0].fits(models[1], config)
    assert not steps[0].fits(models[0], Eager())
    assert copy.deepcopy(steps[0]) is None and pickle.loads(pickle.dumps(steps[0])) is None


def test_a_copied_or_changed_model_generates_its_own_tokens(compiled: list[dict[str, Any]]) -> None:
    """transformers' cached call of the original is not that of the copy, or of the model without quantized layers."""
    model, static = quantized("llama", "cpu"), {"cache_implementation": "static"}
    expected = generate(model, **static)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.neg_()
    assert not torch.equal(generate(other, **static), expected)
    assert torch.equal(generate(model, **static), expected) and len(compiled) == 2
    config = model._compiled_call.config
    qao.dequantize_(model)
    generate(model, **static, compile_config=config)
    assert len(compiled) == 3


# ---- tokens ----------------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {"one": {}, "padded": {"batch": 4}, "beams": {"num_beams": 2}, "assisted": {}}
FAST = {("gemma3_text", "padded")}  # compiling takes seconds
EAGER = ("beams",) if int(transformers.__version__.partition(".")[0]) >= 5 else ("beams", "assisted")  # not compiled
CASES = [
    pytest.param(name, way, marks=() if (name, way) in FAST else pytest.mark.slow)
    for name in MODELS
    for way in WAYS
    if way != "assisted" or "sliding_window" not in MODELS[name]  # such a static cache cannot be cropped
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_tokens_of_the_eager_model(name: str, way: str, device: str) -> None:
    model, options = quantized(name, device), WAYS[way]
    expected = generate(model, **options)
    if way == "assisted":
        options = {"assistant_model": quantized(name, device)}
    if device == "cpu":
        config = transformers.CompileConfig(backend="qao", mode="default")
        config._compile_all_devices = True
        options = {**options, "compile_config": config}
    assert torch.equal(generate(model, **options, cache_implementation="static"), expected)
    assert len(expected[0, 9:].unique()) > 1  # a model that repeats one token shows little
    assert way in EAGER or counters["stats"]["unique_graphs"] > 0


class Streamed:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, tokens: Tensor) -> None:
        self.tokens += tokens.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("returned", [False, True])
def test_sequences_end_at_the_same_token(returned: bool, device: str) -> None:
    """Also on a GPU, where the test for the end is deferred by a step, and no result of that step may be seen."""
    model = quantized("llama", device)
    plain = generate(model, batch=3)
    ends = plain[:, 9:12].flatten().tolist()  # every sequence has ended after three tokens
    options: dict[str, Any] = {"eos_token_id": ends, "return_dict_in_generate": returned, "output_logits": returned}
    expected = generate(model, batch=3, **options)
    one = generate(model, eos_token_id=ends[:1])
    if device == "cpu":
        config = transformers.CompileConfig(backend="eager", mode="default")
        config._compile_all_devices = True
        options["compile_config"] = config
    options["cache_implementation"] = "static"
    found = generate(model, batch=3, **options)
    if returned:
        assert len(found.logits) == len(expected.logits) == found.sequences.shape[1] - 9
        assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
        found, expected = found.sequences, expected.sequences
    assert torch.equal(found, expected) and found.shape[1] < plain.shape[1]
    streamed = Streamed()
    options |= {"eos_token_id": ends[:1], "return_dict_in_generate": False, "output_logits": False}
    assert torch.equal(generate(model, streamer=streamed, **options), one)
    assert streamed.tokens == one[0].tolist() and streamed.ended


def test_the_stop_check_is_deferred_for_compiled_quantized_models_on_a_gpu(compiled: list[dict[str, Any]]) -> None:
    utils = pytest.importorskip("transformers.generation.utils")
    if not hasattr(utils, "DeferredStopCheck"):
        pytest.skip("this version of transformers has no deferred stop check")
    asked, gpu = utils.DeferredStopCheck.is_supported, torch.device("cuda")
    given = {"cache": None, "cache_is_returned": False, "is_assistant": False}
    model = quantized("llama", "cpu")
    model.get_compiled_call(None)
    assert asked(gpu, **given)
    assert not asked(gpu, **{**given, "is_assistant": True})
    model_of("llama", "cpu").get_compiled_call(None)
    assert not asked(gpu, **given)
