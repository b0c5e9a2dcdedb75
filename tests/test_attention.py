"""decode_attention: softmax over a key-value cache, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from ops_support import DTYPES, SHORT, randn
from torch import Tensor
from torch.nn import functional as F

OPS = torch.ops.qao
# batch, heads, kv_heads, queries, keys, size of q and k, size of v
SHAPES = [
    (1, 9, 3, 1, 256, 64, 64),
    (2, 4, 2, 3, 130, 80, 96),
    (1, 8, 8, 16, 1, 128, 64),
    (2, 6, 1, 5, 700, 17, 33),
    (1, 4, 4, 40, 40, 8, 1),
    (3, 2, 1, 1, 127, 256, 256),
]


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """y in float64, and a bound of its error."""
    group = q.shape[1] // k.shape[1]
    q64, k64, v64 = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q64 @ k64.transpose(-1, -2) * scale
    magnitudes = q64.abs() @ k64.abs().transpose(-1, -2) * abs(scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
        if mask.dtype != torch.bool:
            magnitudes = magnitudes + mask.double().abs().where(mask > -1e30, 0)
    weights = torch.softmax(scores, -1).nan_to_num(0)  # a row without a key
    y, size = weights @ v64, weights @ v64.abs()
    # A score is off by 2^-23 times its terms and their number at most; that is the relative error of its exponential.
    # e^x has 2^-22, its sums 2^-23 times the number of keys. Both appear in numerator and denominator.
    relative = 2.0**-23 * (2 * (k.shape[-1] + 4) * magnitudes.amax(-1, keepdim=True).clamp(min=1) + 2 * k.shape[2] + 8)
    return y.transpose(1, 2), (relative * size).transpose(1, 2) + torch.finfo(q.dtype).eps * y.abs().transpose(1, 2)


def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scale = q.shape[-1] ** -0.5
    y = OPS.decode_attention(q, k, v, mask, scale)
    expected, bound = reference(q, k, v, mask, scale)
    assert y.dtype == q.dtype and y.is_contiguous() and y.shape == expected.shape
    assert ((y.double() - expected).abs() <= bound + 1e-30).all()
    return y  # type: ignore[no-any-return]


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, kv_heads, queries, keys, size, value_size = shape
    return (
        randn(batch, heads, queries, size, dtype=dtype, device="cpu", seed=1),
        randn(batch, kv_heads, keys, size, dtype=dtype, device="cpu", seed=2),
        randn(batch, kv_heads, keys, value_size, dtype=dtype, device="cpu", seed=3),
    )


def masks(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor | None]:
    batch, heads, _, queries, keys, *_ = shape
    noise = randn(batch, heads, queries, keys, dtype=torch.float32, device="cpu", seed=4)
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    least = torch.finfo(dtype).min
    return {
        "none": None,
        "causal": causal,
        "causal, least float": torch.zeros(1, 1, queries, keys, dtype=dtype).masked_fill(~causal, least),
        "window": causal & ~causal.roll(-5, 1),
        "padding": (torch.arange(keys) >= 3).expand(batch, 1, 1, keys),
        "by head": noise > 1.5,
        "of all": torch.zeros(1, 1, 1, 1, dtype=torch.bool),
        "all least": torch.full((1, 1, queries, keys), least, dtype=dtype),
        "bias": noise.to(dtype),
        "bias in float32": noise[:, :1],
        "bias, transposed": noise[:1].transpose(2, 3).contiguous().transpose(2, 3),
    }


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for mask in masks(shape, dtype).values():
        check(*operands(shape, dtype), mask)


def test_views_of_a_cache() -> None:
    shape = (2, 4, 2, 2, 50, 32, 32)
    q, k, v = operands(shape, torch.bfloat16)
    expected = check(q, k, v, None)
    longer = torch.cat((k, k.new_full((2, 2, 14, 32), math.nan)), 2)
    by_token = v.transpose(1, 2).contiguous().transpose(1, 2)
    by_column = q.transpose(2, 3).contiguous().transpose(2, 3)  # copied
    assert torch.equal(OPS.decode_attention(by_column, longer[:, :, :50], by_token, None, 32**-0.5), expected)


def test_excluded_keys_are_not_read() -> None:
    """A cache holds whatever was in memory behind the last token."""
    q, k, v = operands((1, 4, 2, 2, 300, 32, 32), torch.float32)
    mask = torch.arange(300) < 77
    expected = check(q, k, v, mask)
    k[:, :, 77:], v[:, :, 77:] = math.nan, math.inf
    added = torch.zeros(300).masked_fill(~mask, torch.finfo(torch.float32).min)
    for given in (mask, added):
        assert torch.equal(OPS.decode_attention(q, k, v, given, 32**-0.5), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=SHORT.get)
def test_rows_without_a_key_are_those_of_torch(dtype: torch.dtype) -> None:
    q, k, v = operands((1, 2, 2, 3, 200, 16, 16), dtype)
    keep = torch.ones(3, 200, dtype=torch.bool)
    keep[1] = False
    for mask in (keep, torch.zeros(3, 200, dtype=dtype).masked_fill(~keep, -math.inf)):
        assert (F.scaled_dot_product_attention(q, k, v, mask)[:, :, 1] == 0).all()
        assert (check(q, k, v, mask)[:, 1] == 0).all()
    assert (OPS.decode_attention(q, k[:, :, :0], v[:, :, :0], None, 0.25) == 0).all()
    assert OPS.decode_attention(q[:, :, :0], k, v, None, 0.25).shape == (1, 0, 2, 16)


def test_nan_and_infinite_scores_are_seen() -> None:
    q, k, v = operands((1, 2, 1, 2, 200, 16, 16), torch.float32)
    k[0, 0, 150, 3] = math.nan
    assert OPS.decode_attention(q, k, v, None, 0.25).isnan().all()
    k[0, 0, 150, 3] = 0
    v[0, 0, 150, 3] = math.inf
    y = OPS.decode_attention(q, k, v, None, 0.25)
    assert (y[..., 3] == math.inf).all() and y[..., :3].isfinite().all()


def test_bits_depend_on_neither_threads_nor_the_batch() -> None:
    q, k, v = operands((3, 8, 2, 1, 900, 64, 64), torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(OPS.decode_attention(q, k, v, None, 0.125))
    finally:
        torch.set_num_threads(threads)
    one = OPS.decode_attention(q[1:2], k[1:2], v[1:2], None, 0.125)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert torch.equal(results[0][1:2], one)


def test_invalid_operands() -> None:
    q, k, v = operands((1, 4, 2, 2, 20, 16, 16), torch.float32)
    for wrong, message in [
        ((q[0], k, v, None), "q, k and v must have shape"),
        ((q, k.bfloat16(), v, None), "q, k and v must have one dtype"),
        ((q, k[:, :, :19], v, None), "k must have shape"),
        ((q[:, :3], k, v, None), "the heads of q must be a multiple"),
        ((q, k, v, torch.ones(3, 20, dtype=torch.bool)), "mask must broadcast"),
        ((q, k, v, torch.ones(2, 20, dtype=torch.int32)), "mask must be float32, float16 or bfloat16"),
        ((q.int(), k, v, None), "q must be float32, float16 or bfloat16"),
    ]:
        with pytest.raises(RuntimeError, match=rf"qao::decode_attention: {message}.* Got q: "):
            OPS.decode_attention(*wrong, 0.25)


def test_registration() -> None:
    q, k, v = operands((1, 4, 2, 2, 20, 16, 16), torch.float32)
    for mask in (None, torch.ones(2, 20, dtype=torch.bool)):
        torch.library.opcheck(
            OPS.decode_attention.default, (q, k, v, mask, 0.25), test_utils=("test_schema", "test_faketensor")
        )
