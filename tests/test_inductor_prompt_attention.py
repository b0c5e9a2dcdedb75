"""Graph pass of attention of a prompt over a static cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qao
import torch
from qao.inductor import masks, prompt_attention, report
from qao.inductor.nodes import value
from test_inductor import fresh  # noqa: F401  # a fixture of every test
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

CAUSAL = "causal attention of a prompt"
QUERIES, KEYS = 24, 40


@torch.library.custom_op("qao_tests::flash_attention", mutates_args=())
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, begins: Tensor, begins_of_keys: Tensor, tokens: int, keys: int, dropout: float,
    is_causal: bool, debug: bool, scale: float, seqused_k: Tensor, window_size_left: int = -1,
    window_size_right: int = -1,
) -> list[Tensor]:  # fmt: skip
    """ATen's operator of a GPU, by its definition."""
    assert is_causal and not dropout and not debug and window_size_right in (-1, 0)
    results = []
    for i, used in enumerate(seqused_k.tolist()):
        assert begins[i + 1] - begins[i] == tokens and begins_of_keys[i + 1] - begins_of_keys[i] == keys >= used
        query = q[begins[i] : begins[i + 1]]
        key, other = (x[begins_of_keys[i] : begins_of_keys[i] + used] for x in (k, v))
        behind = used - tokens + torch.arange(tokens)[:, None] - torch.arange(used)  # from a key to its query
        seen = (behind >= 0) & ((behind <= window_size_left) | (window_size_left < 0))
        operands = (x.transpose(0, 1) for x in (query, key, other))
        y = nn.functional.scaled_dot_product_attention(*operands, attn_mask=seen, scale=scale, enable_gqa=True)
        results.append(y.transpose(0, 1))
    return [torch.cat(results)]


@flash_attention.register_fake
def _(q: Tensor, *_: Any, **__: Any) -> list[Tensor]:
    return [q.new_empty(q.shape)]


@pytest.fixture
def flash_everywhere(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, the operator above takes the place of ATen's."""
    if device == "cpu":
        monkeypatch.setattr(prompt_attention, "_FLASH", torch.ops.qao_tests.flash_attention.default)
        monkeypatch.setattr(prompt_attention, "applies", lambda given: value(given["query"]).shape[2] > 16)


def seen_by(start: int, shift: int, window: int | None) -> Tensor:
    last = torch.arange(QUERIES)[:, None] + start + shift
    keys = torch.arange(KEYS)
    return (keys <= last) & (keys > last - (window or KEYS + QUERIES))


MASKS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], tuple[int, int | None] | None]] = {
    # of queries [Q, 1], keys [1, K] and a start; shift and window
    "plain": (lambda q, k, start: k <= q, (0, None)),
    "mirrored": (lambda q, k, start: q >= k, (0, None)),
    "strict": (lambda q, k, start: k < q + 1, (0, None)),
    "counted": (lambda q, k, start: k <= q + start, (0, None)),
    "shifted": (lambda q, k, start: k - 1 <= q + start + 2, (3, None)),
    "a window": (lambda q, k, start: (k <= q + start) & (k > q + start - 8), (0, 8)),
    "a window, mirrored": (lambda q, k, start: (q + start - 8 < k) & (q + start >= k), (0, 8)),
    "a window of itself": (lambda q, k, start: (k <= q) & (k >= q), (0, 1)),
    "true as well": (lambda q, k, start: (k <= q) & torch.full((), True, device=k.device), (0, None)),
    "a query without keys": (lambda q, k, start: k < q, None),
    "of two starts": (lambda q, k, start: (k <= q + start) & (k > q - 8), None),
    "not behind": (lambda q, k, start: (k <= q) | (k < 4), None),
    "other keys": (lambda q, k, start: (k <= q) & (k != 3), None),
    "behind alone": (lambda q, k, start: k > q, None),
    "twice": (lambda q, k, start: (k <= q) & (k <= q + start), None),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_read(name: str) -> None:
    function, expected = MASKS[name]

    def masked(start: Tensor) -> Tensor:
        queries, keys = torch.arange(QUERIES)[:, None], torch.arange(KEYS)[None]
        return function(queries, keys, start)[None, None].expand(2, 1, -1, -1)

    traced = make_fx(masked, tracing_mode="fake", decomposition_table=select_decomp_table())(torch.tensor(5))
    (result,) = traced.graph.output_node().args
    found = masks.causal(result)
    assert (None if found is None else (found.shift, found.window)) == expected
    if found is not None:
        start = 0 if found.start is None else 5
        assert torch.equal(masked(torch.tensor(5))[0, 0], seen_by(start, found.shift, found.window))


@pytest.mark.parametrize(
    "name,batch", [("llama", 1), ("llama", 2), ("qwen3", 1), ("mistral", 2), ("gemma3_text", 1)], ids=str
)
@torch.no_grad()
def test_prompts_of_models(name: str, batch: int, device: str, flash_everywhere: None) -> None:
    """Logits of the eager model for two parts of a prompt. Windows of 20 tokens, where a model has some."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "pad_token_id": 0}
    window = {"mistral": {"sliding_window": 20}, "gemma3_text": {"sliding_window": 20}}.get(name, {})
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if name == "gemma3_text" else {}
    config = transformers.AutoConfig.for_model(name, **sizes, **window, **layers)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(device)
    ids = torch.randint(1, 512, (batch, 44), device=device)

    def logits(call: Any) -> list[Tensor]:
        cache = transformers.StaticCache(config=config, max_cache_len=64)
        forward(ids, cache)  # makes its tensors: transformers knows that a new cache is empty, and passes no mask
        cache.reset()
        return [call(ids[:, begin:end], cache) for begin, end in ((0, 24), (24, 44))]

    def forward(part: Tensor, cache: Any) -> Tensor:
        return model(part, past_key_values=cache).logits

    expected = logits(forward)
    with report.collected() as seen:
        found = logits(qao.compile(forward, dynamic=False))
    if device == "cuda" and not (seen.replaced or seen.left):
        pytest.skip("torch chose products and a softmax, which no pass knows")
    assert len(seen.replaced[CAUSAL]) == 4, seen
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5 if device == "cpu" else 0.04)


@torch.no_grad()
def test_padding_keeps_its_mask(device: str, flash_everywhere: None) -> None:
    def attention(q: Tensor, k: Tensor, padding: Tensor) -> Tensor:
        index = torch.arange(32, device=q.device)
        mask = (index <= index[:, None]) & padding[:, None, None]
        return nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    q = torch.randn(2, 2, 32, 64, device=device, dtype=torch.bfloat16)
    with report.collected() as seen:
        qao.compile(attention)(q, q, torch.ones(2, 32, dtype=torch.bool, device=device))
    assert CAUSAL not in seen.replaced
