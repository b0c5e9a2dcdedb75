"""Graph pass of rotary embedding, cache and attention of one token."""

from __future__ import annotations

from typing import Any

import pytest
import qao
import torch
from qao.inductor import report, token_attention
from qao.inductor.nodes import value
from test_inductor import fresh, randn  # noqa: F401  # a fixture of every test
from torch import Tensor, nn

TOKEN = "one operator of cache and attention of one token"
ROTATED_TOKEN = "one operator of rotary embedding, cache and attention of one token"


@pytest.fixture
def token_attention_everywhere(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass is for Hopper, but its operator runs on a CPU."""
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the kernel is for Hopper")
    if device == "cpu":
        monkeypatch.setattr(token_attention, "applies", lambda q, k: value(q).shape[2] == 1)


class CachedLayer(nn.Module):
    """Attention with a static cache, written as transformers writes it."""

    def __init__(self, device: str, dtype: torch.dtype, rotates: bool = True) -> None:
        super().__init__()
        self.rotates = rotates
        self.keys, self.values = (
            nn.Buffer(randn(2, 2, 40, 64, dtype=dtype, device=device, seed=seed)) for seed in (1, 2)
        )

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., 32:], x[..., :32]), -1) * sin if self.rotates else x

    def forward(self, qkv: Tensor, position: Tensor, start: Tensor) -> Tensor:
        q, k, v = qkv.view(2, -1, 8, 64).transpose(1, 2).split((4, 2, 2), 1)
        angle = (position[:, None] * torch.linspace(1, 0.1, 32, device=q.device)).repeat(1, 2)[None, None]
        cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
        q, k = self.rotated(q, cos, sin), self.rotated(k, cos, sin)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        index = torch.arange(40, device=q.device)
        mask = (index <= position[:, None]) & (index >= start[:, None])[:, None, None]
        y = nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


def step_of(model: CachedLayer, call: Any, device: str, tokens: int = 1) -> tuple[Tensor, ...]:
    qkv = randn(2, tokens, 512, dtype=torch.bfloat16, device=device, seed=3).to(model.keys.dtype)
    position = torch.arange(20, 20 + tokens, device=device)
    y = call(qkv, position, torch.tensor([0, 3], device=device))
    return y, model.keys.clone(), model.values.clone()


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("dynamic", [None, True])
def test_the_write_to_a_cache_is_part_of_attention(
    dynamic: bool | None, rotates: bool, device: str, token_attention_everywhere: None
) -> None:
    dtype = torch.bfloat16
    model, exact = CachedLayer(device, dtype, rotates), CachedLayer(device, dtype, rotates)
    with report.collected() as seen, torch.inference_mode():
        y, keys, values = step_of(model, qao.compile(model, fullgraph=True, dynamic=dynamic), device)
        exact.double()
        expected = step_of(exact, exact, device)
    if device == "cuda" and not (seen.replaced or seen.left):
        pytest.skip("torch chose products and a softmax, which no pass knows")
    if dynamic:  # with a dynamic size of heads
        assert list(seen.left) == ["attention: the size of a head is dynamic"]
    else:
        assert list(seen.replaced) == ["decode_attention", ROTATED_TOKEN if rotates else TOKEN] and not seen.left
    for got, want, factor in zip((y, keys, values), expected, (8, 2, 0), strict=True):
        bound = torch.finfo(dtype).eps * factor * want.abs().max()
        assert (got.double() - want).abs().max() <= bound


def test_caches_that_others_read_stay(device: str, token_attention_everywhere: None) -> None:
    """Several tokens, a cache that is also a result, and one that is read before the write."""
    model = CachedLayer(device, torch.bfloat16)

    def returned(*given: Tensor) -> tuple[Tensor, Tensor]:
        return model(*given), model.keys * 2

    def read(*given: Tensor) -> tuple[Tensor, Tensor]:
        before = model.keys.sum(2)
        return model(*given), before

    for call, tokens in ((model, 2), (returned, 1), (read, 1)):
        torch._dynamo.reset()
        with report.collected() as seen, torch.inference_mode():
            step_of(model, qao.compile(call, fullgraph=True), device, tokens)
        assert not {TOKEN, ROTATED_TOKEN} & {*seen.replaced}


@pytest.mark.parametrize("name", ["llama", "glm"])
@torch.no_grad()
def test_models_with_a_static_cache(name: str, device: str, token_attention_everywhere: None) -> None:
    """Tokens of the eager model, with left padding. GLM rotates a half of its heads, which Inductor does."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(name, **sizes)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(device)
    ids = torch.randint(1, 512, (2, 8), device=device)
    padded = torch.ones(2, 9, dtype=torch.long, device=device)
    padded[1, :3] = 0

    def step(compile: bool) -> tuple[Tensor, list[Tensor]]:
        cache = transformers.StaticCache(config=config, max_cache_len=32)
        token = model(ids, attention_mask=padded[:, :8], past_key_values=cache).logits[:, -1:].argmax(-1)

        def run(token: Tensor) -> Tensor:
            return model(token, attention_mask=padded, past_key_values=cache).logits  # type: ignore[no-any-return]

        logits = (qao.compile(run) if compile else run)(token)
        return logits, [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]

    with report.collected() as seen:
        logits, caches = step(compile=True)
    assert len(seen.replaced.get(ROTATED_TOKEN if name == "llama" else TOKEN, ())) == 2
    expected, expected_caches = step(compile=False)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for got, want in zip((logits, *caches), (expected, *expected_caches), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance * float(want.abs().max()))
