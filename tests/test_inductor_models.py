"""Graph passes on decoding steps of transformers' models: what they replace, and the error of the result.

On a CPU the passes for Hopper are forced; the operators are right there, but not faster.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import qao
import torch
from qao.inductor import report
from torch import Tensor

transformers: Any = pytest.importorskip("transformers")
GATED = "RMSNorm, 2 products, SiLU gate", "RMSNorm, 3 products"
JOINED = "RMSNorm, 1 product, SiLU gate", "RMSNorm, 1 product"
# What reads norms in two layers, by the number of operators. The head is quantized too.
MODELS: dict[str, dict[str, int]] = {
    "llama": {GATED[0]: 2, GATED[1]: 2, JOINED[1]: 1},
    "phi3": {JOINED[0]: 2, JOINED[1]: 3},
    "olmo2": {JOINED[1]: 1},  # norms behind attention and MLP
    "qwen3": {GATED[0]: 2, GATED[1]: 2, JOINED[1]: 1},
    "glm4": {GATED[1]: 2, JOINED[0]: 2, JOINED[1]: 1},
    "granite": {GATED[0]: 2, GATED[1]: 2, JOINED[1]: 1},
    "gpt_oss": {GATED[1]: 2, JOINED[1]: 1},
    "gemma3_text": {},  # 1 + weight
    "cohere": {},  # LayerNorm
    "starcoder2": {},
}
if int(transformers.__version__.partition(".")[0]) < 5:
    MODELS["olmo2"] = {}  # a graph break parts the last norm and the head
FAST = "phi3", "olmo2"


@pytest.fixture(autouse=True)
def fresh(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    if device == "cpu":
        monkeypatch.setattr("qao.inductor.norms.on_hopper", lambda node: True)
    with torch.compiler.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def model_of(name: str, device: str) -> Any:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "vocab_size": 128}
    try:
        config = transformers.AutoConfig.for_model(name, **sizes)
    except ValueError:
        pytest.skip(f"this transformers has no {name}")
    for key, value in (("pad_token_id", 0), ("num_local_experts", 4), ("sliding_window", 16)):
        if hasattr(config, key):
            setattr(config, key, value)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter += 0.3 * torch.randn_like(parameter)
    qao.quantize_(model, qao.Int4WeightOnly(group_size=32), progress=False)
    return model.to(device)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
@torch.no_grad()
def test_a_decoding_step(name: str, device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the passes are for Hopper")
    model = model_of(name, device)
    ids = torch.randint(128, (1, 8), device=device)

    def step(each: Any, compile: bool = False) -> Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        each(ids, past_key_values=cache)

        def run(token: Tensor) -> Tensor:
            return each(token, past_key_values=cache).logits  # type: ignore[no-any-return]

        return (qao.compile(run) if compile else run)(ids[:, :1]).double()

    with report.collected() as seen:
        actual = step(model, compile=True)
    fused = {what: len(places) for what, places in seen.replaced.items() if "RMSNorm" in what}
    assert fused == {f"one operator of {what} (int4_mm)": count for what, count in MODELS[name].items()}
    eager, exact = step(model), step(qao.dequantize_(copy.deepcopy(model)).float())
    error, of_eager = ((each - exact).norm() / exact.norm() for each in (actual, eager))
    assert error <= 1.5 * of_eager + 1e-3 and of_eager < 0.05
