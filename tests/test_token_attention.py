"""_token_attention: rotary embedding, the write to a static cache and attention of one token, against float64."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from ops_support import randn
from test_attention import reference
from torch import Tensor

OPS = torch.ops.qao
# batch, heads, kv_heads, keys, size: each number of CTAs in a cluster, groups of 1 to 8, several tiles a warp
SHAPES = [
    (1, 32, 8, 784, 128),
    (1, 8, 8, 40, 64),
    (2, 16, 2, 300, 128),
    (3, 4, 1, 2000, 64),
    (1, 8, 1, 4096, 128),
    (1, 9, 3, 256, 64),
    (2, 5, 1, 16, 128),
    (20, 32, 8, 600, 128),  # more heads than a GPU has SMs
    (140, 8, 1, 100, 128),
    (40, 24, 4, 300, 64),
]
DTYPES = torch.bfloat16, torch.float16
MASKS = "none", "causal", "padded", "holes", "minus infinity", "all least", "bias", "no key"


class Operands(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor | None
    sin: Tensor | None
    position: Tensor
    key_cache: Tensor
    value_cache: Tensor
    mask: Tensor | None


def operands(shape: tuple[int, ...], dtype: torch.dtype, device: str, mask: str, rotates: bool) -> Operands:
    batch, heads, kv_heads, keys, size = shape

    def of_token(count: int, seed: int) -> Tensor:  # as a product makes it: [B, 1, heads, D], transposed
        return randn(batch, 1, count, size, dtype=dtype, device=device, seed=seed).transpose(1, 2)

    angle = torch.linspace(0, 3, size // 2, device=device).repeat(2).view(1, 1, 1, size)
    position = 2 * keys // 3
    caches = [randn(batch, kv_heads, keys, size, dtype=dtype, device=device, seed=seed) for seed in (4, 5)]
    if mask in ("causal", "padded", "holes", "minus infinity", "bias"):  # memory that no one wrote
        for cache in caches:
            cache[:, :, position + 1 :] = math.nan
    return Operands(
        of_token(heads, 1), of_token(kv_heads, 2), of_token(kv_heads, 3),
        angle.cos().to(dtype) if rotates else None, angle.sin().to(dtype) if rotates else None,
        torch.tensor([position], device=device), *caches, made_mask(mask, batch, keys, position, dtype, device),
    )  # fmt: skip


def made_mask(name: str, batch: int, keys: int, position: int, dtype: torch.dtype, device: str) -> Tensor | None:
    index = torch.arange(keys, device=device).view(1, 1, 1, keys)
    causal = index <= position
    zeros = torch.zeros(1, 1, 1, keys, dtype=dtype, device=device)
    masks = {
        "none": None,
        "causal": causal,
        "padded": causal & (index >= torch.arange(batch, device=device).view(batch, 1, 1, 1) % 7),
        "holes": causal & ((index % 5 != 2) | (index == position)),
        "minus infinity": zeros.masked_fill(~causal, -math.inf),
        "all least": zeros + torch.finfo(dtype).min,
        "bias": randn(1, 1, 1, keys, dtype=torch.float32, device=device, seed=6).masked_fill(~causal, -math.inf),
        "no key": torch.zeros_like(causal),
    }
    return masks[name]


def run(given: Operands, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """y, and the caches after the call."""
    keys, values = given.key_cache.clone(), given.value_cache.clone()
    ranges = None if given.mask is None else OPS._key_range(given.mask)
    rest = given.mask, ranges, scale
    y = OPS._token_attention(*given[:6], keys, values, *rest)
    return y, keys, values


def rotated(x: Tensor, given: Operands) -> Tensor:
    """In float64."""
    if given.cos is None or given.sin is None:
        return x.double()
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x.double() * given.cos.double() + turned.double() * given.sin.double()


def check(given: Operands) -> None:
    scale, position = given.q.shape[-1] ** -0.5, int(given.position)
    y, keys, values = run(given, scale)
    dtype = y.dtype
    expected_keys, expected_values = given.key_cache.clone(), given.value_cache.clone()
    exact = rotated(given.k, given)[:, :, 0]
    expected_keys[:, :, position] = keys[:, :, position]  # compared below
    expected_values[:, :, position] = given.v[:, :, 0]
    assert torch.equal(keys.nan_to_num(9), expected_keys.nan_to_num(9))
    assert torch.equal(values.nan_to_num(9), expected_values.nan_to_num(9))
    # One rounding of float32 arithmetic, of terms up to twice the largest element
    error = (keys[:, :, position].double() - exact).abs()
    assert (error <= torch.finfo(dtype).eps / 2 * exact.abs() + 2.0**-22 * given.k.double().abs().amax()).all()
    # Attention of the rotated q, rounded to the dtype as that of the key; half a unit of it moves a score
    q = rotated(given.q, given)
    clean = [cache.nan_to_num(0) for cache in (keys, values)]
    attended, bound = reference(q.to(dtype), *clean, given.mask, scale)
    unit = torch.finfo(dtype).eps * q.abs().amax() * clean[0].double().abs().sum(-1).amax() * scale * 2.0**-15
    assert y.shape == attended.shape and y.is_contiguous()
    assert ((y.double() - attended).abs() <= bound + (unit + 1e-30) * clean[1].double().abs().amax()).all()
    for again, before in zip(run(given, scale), (y, keys, values), strict=True):
        assert torch.equal(again.nan_to_num(9), before.nan_to_num(9))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape: tuple[int, ...], mask: str, device: str) -> None:
    if device == "cpu" and shape == SHAPES[-1]:
        shape = (3, 6, 3, 60, 16)  # there the size does not matter
    for dtype in DTYPES:
        for rotates in (True, False):
            check(operands(shape, dtype, device, mask, rotates))


@pytest.mark.parametrize("size", [32, 80, 256])
def test_other_heads(size: int, device: str) -> None:
    """A CPU takes heads of any even size, a GPU those that it has a kernel for."""
    given = operands((1, 4, 2, 50, size), torch.float32 if device == "cpu" else torch.bfloat16, device, "causal", True)
    if device == "cpu":
        return check(given)
    with pytest.raises(RuntimeError, match=r"qao::_token_attention: a GPU takes 16 bits, heads of 64 or 128 elements"):
        run(given, 0.3)


@pytest.mark.parametrize("position", [-1, 0, 39, 40, 1 << 40])
def test_positions(position: int, device: str) -> None:
    """A negative position counts from the end, as an index does. Nothing is written beyond the cache."""
    given = operands((2, 4, 2, 40, 64), torch.bfloat16, device, "none", True)
    y, keys, values = run(given._replace(position=torch.tensor([position], device=device)), 0.3)
    changed = (keys != given.key_cache).any(-1).any(0).any(0).nonzero().flatten().tolist()
    assert changed == (values != given.value_cache).any(-1).any(0).any(0).nonzero().flatten().tolist()
    assert changed == ([position % 40] if position < 40 else [])
    attended, bound = reference(rotated(given.q, given).to(y.dtype), keys, values, None, 0.3)
    assert ((y.double() - attended).abs() <= bound + 2.0**-7).all()


def test_key_range(device: str) -> None:
    """Begin, end, whether all keys between them count as they are, whether finite values exclude all."""
    index = torch.arange(300, device=device)
    rows = torch.stack((index < 200, (index > 3) & (index < 250), index % 2 == 0, index < 0, index > 298))
    mask = rows.view(5, 1, 1, 300)
    assert OPS._key_range(mask).tolist() == [
        [0, 200, 1, 0], [4, 250, 1, 0], [0, 299, 0, 0], [300, 0, 0, 0], [299, 300, 1, 0]
    ]  # fmt: skip
    least = torch.finfo(torch.bfloat16).min
    added = torch.zeros(300, dtype=torch.bfloat16, device=device)
    added = torch.stack((added.masked_fill(~rows[0], -math.inf), added.masked_fill(~rows[1], least), added + least))
    added = torch.cat((added, (added[:1] + (index == 7))))
    expected = [[0, 200, 1, 0], [4, 250, 1, 0], [0, 300, 0, 1], [0, 200, 0, 0]]
    assert OPS._key_range(added.view(4, 1, 1, 300)).tolist() == expected
    assert OPS._key_range(mask.expand(5, 1, 1, 300)[::2]).tolist() == [[0, 200, 1, 0], [0, 299, 0, 0], [299, 300, 1, 0]]


def test_errors(device: str) -> None:
    given = operands((2, 4, 2, 40, 64), torch.bfloat16, device, "causal", True)

    def fails(match: str, **other: Any) -> None:
        with pytest.raises(RuntimeError, match=rf"qao::_token_attention: {match}"):
            run(given._replace(**other), 0.3)

    fails("q, k, v, cos, sin and the caches must have one dtype", k=given.k.half())
    fails("q must have shape", k=given.k[:, :1])
    fails("q must have shape", v=given.v[..., :32])
    fails("cos and sin must be given together", sin=None)
    fails("cos and sin must have shape", cos=given.cos[..., :32])  # type: ignore[index]
    fails("position must be one int64 number", position=given.position.int())
    fails("elements of a head must be contiguous", q=given.q.repeat_interleave(2, -1)[..., ::2])
    fails("mask must have shape", mask=torch.ones(2, 1, 1, 41, dtype=torch.bool, device=device))
    with pytest.raises(RuntimeError, match=r"qao::_key_range: mask must have shape \[batch or 1, 1, 1, keys\]"):
        OPS._key_range(torch.ones(2, 4, 1, 41, dtype=torch.bool, device=device))
