"""decode_attention: softmax over a key-value cache, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from ops_support import DTYPES, SHORT, check_chain_in_a_graph, randn
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
# For a GPU: each number of CTAs in a cluster, groups of every size, several blocks of 16 rows, several tiles a warp.
GPU_SHAPES = [
    (1, 32, 8, 1, 768, 128, 128),
    (1, 8, 8, 16, 1, 128, 64),
    (2, 4, 2, 3, 130, 80, 96),
    (3, 21, 3, 1, 500, 96, 96),
    (1, 16, 1, 3, 2000, 64, 64),
    (1, 12, 4, 6, 300, 256, 256),
    (5, 8, 1, 1, 4096, 256, 200),
    (64, 24, 6, 1, 333, 128, 128),
    (1, 4, 4, 40, 40, 8, 16),
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
    # A GPU rounds the weights, which are at most 1, to the dtype. Small ones are subnormal in float16.
    rounded = torch.finfo(q.dtype).eps / 2 * size if q.is_cuda else torch.zeros_like(size)
    if q.is_cuda and q.dtype == torch.float16:
        rounded += 2.0**-25 * ((weights > 0).double() @ v64.abs())
    # A score is off by 2^-23 times its terms and their number at most; that is the relative error of its exponential.
    # e^x has 2^-22, its sums 2^-23 times the number of keys. Both appear in numerator and denominator.
    relative = 2.0**-23 * (2 * (k.shape[-1] + 4) * magnitudes.amax(-1, keepdim=True).clamp(min=1) + 2 * k.shape[2] + 8)
    bound = relative * size + rounded + torch.finfo(q.dtype).eps * y.abs()
    return y.transpose(1, 2), bound.transpose(1, 2)


def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scale = q.shape[-1] ** -0.5
    y = OPS.decode_attention(q, k, v, mask, scale)
    expected, bound = reference(q, k, v, mask, scale)
    assert y.dtype == q.dtype and y.is_contiguous() and y.shape == expected.shape
    assert ((y.double() - expected).abs() <= bound + 1e-30).all()
    return y  # type: ignore[no-any-return]


def operands(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, kv_heads, queries, keys, size, value_size = shape
    return (
        randn(batch, heads, queries, size, dtype=dtype, device=device, seed=1),
        randn(batch, kv_heads, keys, size, dtype=dtype, device=device, seed=2),
        randn(batch, kv_heads, keys, value_size, dtype=dtype, device=device, seed=3),
    )


def masks(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> dict[str, Tensor | None]:
    batch, heads, _, queries, keys, *_ = shape
    noise = randn(batch, heads, queries, keys, dtype=torch.float32, device=device, seed=4)
    causal = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    least = torch.finfo(dtype).min
    return {
        "none": None,
        "causal": causal,
        "causal, least float": torch.zeros(1, 1, queries, keys, dtype=dtype, device=device).masked_fill(~causal, least),
        "window": causal & ~causal.roll(-5, 1),
        "padding": (torch.arange(keys, device=device) >= 3).expand(batch, 1, 1, keys),
        "by head": noise > 1.5,
        "of all": torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device),
        "all least": torch.full((1, 1, queries, keys), least, dtype=dtype, device=device),
        "bias": noise.to(dtype),
        "bias in float32": noise[:, :1],
        "bias, transposed": noise[:1].transpose(2, 3).contiguous().transpose(2, 3),
    }


def runs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> bool:
    return device == "cpu" or (dtype != torch.float32 and all(size % 8 == 0 for size in shape[5:]))


def test_against_float64_on_a_gpu() -> None:
    """Every shape, mask and dtype."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    for shape in GPU_SHAPES:
        for dtype in (torch.bfloat16, torch.float16):
            q, k, v = operands(shape, dtype, "cuda")
            for name, mask in masks(shape, dtype, "cuda").items():
                try:
                    assert torch.equal(check(q, k, v, mask), OPS.decode_attention(q, k, v, mask, shape[5] ** -0.5))
                except AssertionError as error:
                    raise AssertionError(f"{shape} {dtype} {name}") from error


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    q, k, v = operands(shape, dtype, device)
    for mask in masks(shape, dtype, device).values():
        if runs(shape, dtype, device):
            check(q, k, v, mask)
            continue
        with pytest.raises(RuntimeError, match=r"qao::decode_attention: a GPU takes .*scaled_dot_product_attention"):
            OPS.decode_attention(q, k, v, mask, 0.25)


def test_views_of_a_cache(device: str) -> None:
    shape = (2, 4, 2, 2, 50, 32, 32)
    q, k, v = operands(shape, torch.bfloat16, device)
    expected = check(q, k, v, None)
    longer = torch.cat((k, k.new_full((2, 2, 14, 32), math.nan)), 2)
    by_token = v.transpose(1, 2).contiguous().transpose(1, 2)
    by_column = q.transpose(2, 3).contiguous().transpose(2, 3)  # copied
    assert torch.equal(OPS.decode_attention(by_column, longer[:, :, :50], by_token, None, 32**-0.5), expected)
    odd = torch.cat((v.new_full((2, 2, 50, 1), math.nan), v), 3)[..., 1:]  # on a GPU copied, as is the next
    later = torch.cat((q.new_zeros(1), q.flatten()))[1:].view_as(q)
    assert torch.equal(OPS.decode_attention(later, k, odd, None, 32**-0.5), expected)


@pytest.mark.parametrize("keys", [300, 4096])
def test_excluded_keys_are_not_read(keys: int, device: str) -> None:
    """A cache holds whatever was in memory behind the last token."""
    q, k, v = operands((1, 4, 2, 2, keys, 32, 32), torch.bfloat16, device)
    index = torch.arange(keys, device=device)
    mask = (index < 77) & (index > 4) & (index != 50) & (index != 62)
    expected = check(q, k, v, mask)
    k[:, :, ~mask], v[:, :, ~mask] = math.nan, math.inf
    added = torch.zeros(keys, device=device).masked_fill(~mask, torch.finfo(torch.float32).min)
    for given in (mask, added, added.bfloat16()):
        assert torch.equal(OPS.decode_attention(q, k, v, given, 32**-0.5), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_rows_without_a_key_are_those_of_torch(dtype: torch.dtype, device: str) -> None:
    if not runs((), dtype, device):
        pytest.skip("no float32 on a GPU")
    q, k, v = operands((1, 2, 2, 3, 200, 16, 16), dtype, device)
    keep = torch.ones(3, 200, dtype=torch.bool, device=device)
    keep[1] = False
    for mask in (keep, torch.zeros(3, 200, dtype=dtype, device=device).masked_fill(~keep, -math.inf)):
        if device == "cpu":  # torch's kernels for GPUs disagree with each other
            assert (F.scaled_dot_product_attention(q, k, v, mask)[:, :, 1] == 0).all()
        assert (check(q, k, v, mask)[:, 1] == 0).all()
    assert (OPS.decode_attention(q, k[:, :, :0], v[:, :, :0], None, 0.25) == 0).all()
    assert OPS.decode_attention(q[:, :, :0], k, v, None, 0.25).shape == (1, 0, 2, 16)


def test_nan_and_infinite_scores_are_seen(device: str) -> None:
    q, k, v = operands((1, 2, 1, 2, 200, 16, 16), torch.bfloat16, device)
    k[0, 0, 150, 3] = math.nan
    assert OPS.decode_attention(q, k, v, None, 0.25).isnan().all()
    k[0, 0, 150, 3] = 0
    v[0, 0, 150, 3] = math.inf
    y = OPS.decode_attention(q, k, v, None, 0.25)
    assert (y[..., 3] == math.inf).all() and y[..., :3].isfinite().all()


def test_calls_in_a_cuda_graph() -> None:
    """Each call reads what the kernel in front of it wrote, which it may overlap."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    q, k, v = operands((2, 32, 8, 1, 700, 128, 128), torch.bfloat16, "cuda")

    def chain() -> Tensor:
        y, values = q, v
        for _ in range(4):
            y = OPS.decode_attention(y, k, values, None, 0.1).transpose(1, 2)
            values = values + y[:, ::4]
        return y.contiguous()

    check_chain_in_a_graph(chain, q)


def test_bits_depend_on_neither_threads_nor_the_batch() -> None:
    q, k, v = operands((3, 8, 2, 1, 900, 64, 64), torch.bfloat16, "cpu")
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
    q, k, v = operands((1, 4, 2, 2, 20, 16, 16), torch.float32, "cpu")
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
    q, k, v = operands((1, 4, 2, 2, 20, 16, 16), torch.float32, "cpu")
    for mask in (None, torch.ones(2, 20, dtype=torch.bool)):
        torch.library.opcheck(
            OPS.decode_attention.default, (q, k, v, mask, 0.25), test_utils=("test_schema", "test_faketensor")
        )
