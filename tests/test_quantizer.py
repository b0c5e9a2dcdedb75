"""The quantizer against the float64 reference: q, scales, zero points and the reported error."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from qao.ops import reference
from qao.ops.serial import SERIAL_VALUES
from qao.quant_primitives import integer as quantizer
from qao.quant_primitives.fp8 import quantize_fp8
from qao.quant_primitives.importance import estimate_importance, importance_part
from qao.quant_primitives.integer import QuantizedWeight, quantize_int4, quantize_int8
from qao.schemes import SCHEMES
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EIGHT_BITS = (quantize_int8, *(partial(quantize_fp8, granularity=g) for g in ("row", "tensor", "block")))
symmetric_or_not = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])


def random_weight(n: int, k: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)) * 0.02).to(device, dtype)


def dense(quantized: QuantizedWeight, group_size: int) -> Tensor:
    return reference.dequantize(quantized.q, quantized.scales, quantized.zeros, group_size)


def group_errors(weight: Tensor, approximation: Tensor, group_size: int) -> Tensor:
    """Squared error [N, groups]; group_size divides K."""
    return (weight.double() - approximation).square().unflatten(1, (-1, group_size)).sum(-1)


@symmetric_or_not
@pytest.mark.parametrize("group_size, k", [(32, 96), (64, 100), (128, 128), (256, 300), (-1, 77)])
def test_round_to_nearest_is_the_reference(symmetric: bool, group_size: int, k: int, device: str) -> None:
    """On multiples of 1/8 with a scale that is a power of two every step is exact, so equality is."""
    generator = torch.Generator().manual_seed(k)
    weight = torch.randint(-7, 8, (5, k), generator=generator).float() / 8
    size = k if group_size == -1 else group_size
    weight[:, ::size] = -1.0  # symmetric: scale 1/8
    if not symmetric:
        weight[:, 1::size] = 0.875  # asymmetric: range 15/8, scale 1/8, zero point 8
    got = quantize_int4(
        weight.to(device), group_size, symmetric=symmetric, scale_dtype=torch.float32, clip_search=False
    )
    q, scales, zeros = reference.quantize_int4(weight, group_size, symmetric=symmetric)
    assert torch.equal(got.q.cpu(), q)
    assert torch.equal(got.scales.cpu().double(), scales)
    if symmetric:
        assert got.zeros is None
    else:
        assert got.zeros is not None and torch.equal(got.zeros.cpu().double(), zeros)


@symmetric_or_not
def test_round_to_nearest_is_near_the_reference_on_any_weight(symmetric: bool, device: str) -> None:
    weight = random_weight(64, 320, device)
    got = quantize_int4(weight, 64, symmetric=symmetric, scale_dtype=torch.float32, clip_search=False)
    q, scales, zeros = reference.quantize_int4(weight.cpu(), 64, symmetric=symmetric)
    # float32 against float64: a few roundings of 2^-24 in the scale
    torch.testing.assert_close(got.scales.cpu().double(), scales, rtol=4 * 2.0**-24, atol=0)
    expected = (
        weight.cpu().double() - reference.dequantize(q, scales, zeros, 64)
    ).norm() / weight.cpu().double().norm()
    # A value within those roundings of a tie may go to the other side, which costs next to nothing.
    assert got.relative_error == pytest.approx(expected.item(), rel=1e-4)


@symmetric_or_not
@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_reported_error_is_the_real_one(
    symmetric: bool, scale_dtype: torch.dtype, dtype: torch.dtype, device: str
) -> None:
    weight = random_weight(48, 200, device, dtype)
    got = quantize_int4(weight, 64, symmetric=symmetric, scale_dtype=scale_dtype)
    assert got.q.dtype == torch.uint8 and got.q.shape == (48, 200) and int(got.q.max()) <= 15
    assert got.scales.dtype == scale_dtype and got.scales.shape == (48, 4)
    error = (weight.double() - dense(got, 64)).norm() / weight.double().norm()
    # The quantizer sums squares of float32 differences.
    assert got.relative_error == pytest.approx(error.item(), rel=1e-5)


@symmetric_or_not
def test_scales_are_rounded_before_q_is_chosen(symmetric: bool, device: str) -> None:
    """Every value is at the nearest code of the rounded scale: half a step away, or clipped at an end."""
    weight = random_weight(32, 256, device)
    got = quantize_int4(weight, 128, symmetric=symmetric, scale_dtype=torch.bfloat16)
    step = got.scales.double().abs().repeat_interleave(128, 1)
    distance = (weight.double() - dense(got, 128)).abs()
    clipped = (got.q == 0) | (got.q == 15)
    assert (distance <= step / 2 * (1 + 2.0**-20))[~clipped].all()


@symmetric_or_not
@pytest.mark.parametrize("group_size", [32, 128])
def test_clip_search_lowers_the_error_of_every_group(symmetric: bool, group_size: int, device: str) -> None:
    weight = random_weight(64, 512, device)
    plain, searched = (
        quantize_int4(
            weight,
            group_size,
            symmetric=symmetric,
            scale_dtype=torch.float32,
            clip_search=search,
            importance=torch.ones(512),
        )
        for search in (False, True)
    )
    before = group_errors(weight, dense(plain, group_size), group_size)
    after = group_errors(weight, dense(searched, group_size), group_size)
    assert (after <= before * (1 + 1e-5)).all()
    assert searched.relative_error < plain.relative_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_clip_search_chooses_the_best_of_its_ranges(dtype: torch.dtype, device: str) -> None:
    """Against every range tried one by one in float64, with errors weighed by the importance of their columns."""
    weight = random_weight(16, 64, device)
    importance = torch.linspace(0, 3, 64, device=device).square().to(dtype)
    got = quantize_int4(weight, 32, symmetric=True, scale_dtype=torch.float32, importance=importance)
    weights = importance.double().view(2, 32)
    groups = weight.double().unflatten(1, (-1, 32))
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    errors = []
    for factor in quantizer._CLIP_FACTORS_INT4:
        scale = extreme / -8 * factor
        errors.append((((groups / scale).round().clamp(-8, 7) * scale - groups).square() * weights).sum(-1))
    best = torch.stack(errors).amin(0)
    found = (weight.double() - dense(got, 32)).square().unflatten(1, (-1, 32)) * weights
    torch.testing.assert_close(found.sum(-1), best, rtol=1e-4, atol=0)


def test_the_importance_is_estimated_where_none_is_given(device: str) -> None:
    weight = random_weight(48, 128, device) * torch.logspace(-3, 1, 128, device=device)
    squares = weight.double().square().mean(0)
    estimate = estimate_importance(weight)
    torch.testing.assert_close(estimate.double(), 1 / (squares / squares.mean() + 1e-4), rtol=1e-5, atol=0)
    default, given, alike = (
        quantize_int4(weight, 32, symmetric=False, scale_dtype=torch.float32, importance=importance)
        for importance in (None, estimate, torch.ones(128))
    )
    assert torch.equal(default.scales, given.scales) and torch.equal(default.q, given.q)
    assert not torch.equal(default.scales, alike.scales)


def test_columns_of_an_embedding_or_head_count_alike(device: str) -> None:
    columns = torch.logspace(-1, 1, 64, device=device)
    weight = random_weight(1024, 64, device) * columns
    assert torch.equal(estimate_importance(weight), torch.ones(64, device=device))
    assert estimate_importance(weight[1:]).unique().numel() > 1
    table, rows = (quantize_int4(w, 64, symmetric=False, scale_dtype=torch.float32) for w in (weight, weight[1:]))
    error, weighed = (dense(made, 64) - w.double() for made, w in ((table, weight), (rows, weight[1:])))
    assert error.norm() < 0.9 * weighed.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("k", [96, SERIAL_VALUES + 64])
def test_strides_of_a_weight_change_no_bit(k: int, dtype: torch.dtype, device: str) -> None:
    """torch reduces a transposed or sliced tensor in another order than a contiguous one."""
    weight = random_weight(80, k, device, dtype)
    others = (weight.t().contiguous().t(), torch.stack((weight, weight), 2)[:, :, 1])
    for other in others:
        assert other.stride() != weight.stride() and torch.equal(other, weight)
        for name in ("q_proj", "down_proj"):  # sums down columns and along rows
            assert torch.equal(importance_part(other, name), importance_part(weight, name))
        assert torch.equal(estimate_importance(other), estimate_importance(weight))
        for kind in SCHEMES.values():
            scheme = kind()
            first, second = (scheme.quantize(one).tensors() for one in (other, weight))
            for key, tensor in first.items():
                assert tensor is None or torch.equal(tensor, second[key]), f"{scheme.word} {key}"


@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(63),
        torch.ones(64, 1),
        torch.ones(64, dtype=torch.int32),
        -torch.ones(64),
        torch.full((64,), torch.inf),
    ],
    ids=["short", "matrix", "integers", "negative", "infinite"],
)
def test_importance_that_is_none(wrong: Tensor, device: str) -> None:
    weight = random_weight(4, 64, device)
    with pytest.raises(ValueError, match=r"^w: importance must be of shape \[64\] in a float dtype.*not torch"):
        quantize_int4(weight, 32, symmetric=True, scale_dtype=torch.float32, importance=wrong, name="w")


@pytest.mark.parametrize("group_size, k", [(32, 96), (128, 256), (-1, 80)])
def test_a_grid_comes_back_exactly(group_size: int, k: int, device: str) -> None:
    """Sixteen steps from lowest to highest with a float zero point, as in 4-bit files."""
    size = k if group_size == -1 else group_size
    generator = torch.Generator().manual_seed(k)
    codes = torch.randint(0, 16, (24, k // size, size), generator=generator)
    codes[..., 3], codes[..., 17] = 0, 15
    scales = torch.rand(24, k // size, 1, generator=generator) + 0.5
    zeros = torch.rand(24, k // size, 1, generator=generator) * 0.6 + torch.randint(-20, 20, (24, k // size, 1)) + 0.2
    weight = ((codes - zeros) * scales).flatten(1)
    got = quantize_int4(weight.to(device), group_size, symmetric=False, scale_dtype=torch.float32)
    assert torch.equal(got.q.cpu(), codes.flatten(1).to(torch.uint8))
    distance = (dense(got, group_size).cpu() - weight.double()).abs()
    # A difference of extremes, a quotient and the values of the weight itself, each rounded to float32.
    assert distance.max() <= 40 * 1.5 * 2.0**-21
    off = weight.clone()
    off[:, 5] += 0.3 * scales[:, 0, 0]  # one value between two steps: a grid no more
    moved = quantize_int4(off.to(device), group_size, symmetric=False, scale_dtype=torch.float32)
    assert not torch.equal(moved.scales[:, 0], got.scales[:, 0])
    assert torch.equal(moved.scales[:, 1:], got.scales[:, 1:])


@symmetric_or_not
def test_short_last_group_is_quantized_by_itself(symmetric: bool, device: str) -> None:
    weight = random_weight(8, 100, device)
    importance = torch.rand(100, generator=torch.Generator().manual_seed(0))
    whole, first, last = (
        quantize_int4(weight[:, part], 64, symmetric=symmetric, scale_dtype=torch.float32, importance=importance[part])
        for part in (slice(0, 100), slice(0, 64), slice(64, 100))
    )
    assert torch.equal(whole.q, torch.cat((first.q, last.q), 1))
    assert torch.equal(whole.scales, torch.cat((first.scales, last.scales), 1))


@symmetric_or_not
def test_chunks_of_rows_do_not_change_the_result(symmetric: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(37, 130, device)
    whole = quantize_int4(weight, 32, symmetric=symmetric, scale_dtype=torch.bfloat16)
    monkeypatch.setitem(quantizer._CHUNK_ELEMENTS, device, 5 * 130)
    chunked = quantize_int4(weight, 32, symmetric=symmetric, scale_dtype=torch.bfloat16)
    assert torch.equal(whole.q, chunked.q) and torch.equal(whole.scales, chunked.scales)
    assert chunked.relative_error == pytest.approx(whole.relative_error, rel=1e-6)


@symmetric_or_not
@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_groups_of_zeros(symmetric: bool, scale_dtype: torch.dtype, device: str) -> None:
    weight = random_weight(6, 128, device)
    weight[0] = 0
    weight[1, 32:64] = 0
    got = quantize_int4(weight, 32, symmetric=symmetric, scale_dtype=scale_dtype)
    assert got.scales.isfinite().all() and (got.scales != 0).all()
    assert (dense(got, 32)[weight == 0] == 0).all()
    nothing = quantize_int4(torch.zeros(3, 40, device=device), 32, symmetric=symmetric, scale_dtype=scale_dtype)
    assert nothing.relative_error == 0


@symmetric_or_not
@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1e-8, 1e-4, 1e4])
def test_extreme_magnitudes_stay_finite(
    symmetric: bool, scale_dtype: torch.dtype, magnitude: float, device: str
) -> None:
    weight = random_weight(4, 64, device) / 0.02 * magnitude
    got = quantize_int4(weight, 32, symmetric=symmetric, scale_dtype=scale_dtype)
    assert got.scales.isfinite().all() and (got.scales != 0).all()
    assert (dense(got, 32).abs() <= 2 * weight.double().abs().max() + 8 * torch.finfo(scale_dtype).tiny).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(value: float, device: str) -> None:
    weight = random_weight(4, 64, device)
    weight[2, 3] = value
    with pytest.raises(ValueError, match=r"^model\.layer: the weight \[4, 64\].*holds NaN or Inf"):
        quantize_int4(weight, 32, symmetric=True, scale_dtype=torch.float32, name="model.layer")


def test_scales_that_overflow(device: str) -> None:
    with pytest.raises(ValueError, match=r"^w: a scale of the weight.*overflows torch.float16.*wider scale_dtype"):
        quantize_int4(torch.full((2, 32), 1e6, device=device), 32, symmetric=True, scale_dtype=torch.float16, name="w")


def test_input_is_left_alone(device: str) -> None:
    weight = random_weight(4, 64, device).requires_grad_()
    before = weight.detach().clone()
    got = quantize_int4(weight, 32, symmetric=False, scale_dtype=torch.float32)
    assert torch.equal(weight.detach(), before)
    assert not got.scales.requires_grad


def test_memory_is_bounded(device: str) -> None:
    if device == "cpu":
        pytest.skip("torch counts the bytes of a GPU only")
    weight = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = quantize_int4(weight, 128, symmetric=False, scale_dtype=torch.bfloat16)
    kept = result.q.numel() + 4 * result.scales.numel()
    # Five float32 copies of a chunk: values, the same grouped, two of scratch, codes; and sixteen of a value a group.
    assert torch.cuda.max_memory_allocated() - before <= kept + (5 + 16 / 128) * 4 * quantizer._CHUNK_ELEMENTS["cuda"]


# ---- eight bits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("clip_search", [False, True])
def test_int8_is_the_nearest_code_of_its_scale(clip_search: bool, dtype: torch.dtype, device: str) -> None:
    weight = random_weight(37, 300, device, dtype)
    weight[3] = 0
    got = quantize_int8(weight, clip_search=clip_search)
    assert got.q.dtype == torch.int8 and int(got.q.abs().max()) <= 127 and got.zeros is None
    assert got.scales.dtype == torch.float32 and got.scales.shape == (37,) and (got.scales > 0).all()
    dense8 = reference.dequantize_8bit(got.q, got.scales)
    distance, step = (weight.double() - dense8).abs(), got.scales.double()[:, None]
    # The quotient, up to 127, is rounded to float32 before it is rounded to a code.
    assert (distance <= step * (0.5 + 127 * 2.0**-23))[got.q.abs() < 127].all()
    assert (dense8[3] == 0).all()
    assert got.relative_error == pytest.approx((distance.norm() / weight.double().norm()).item(), rel=1e-5)
    if not clip_search:  # the whole range: the largest of each row becomes 127
        largest = weight.float().abs().amax(1)
        torch.testing.assert_close(got.scales[largest > 0], largest[largest > 0] / 127, rtol=2.0**-22, atol=0)


def test_clip_search_lowers_the_error_of_every_row(device: str) -> None:
    weight = random_weight(64, 512, device)
    weight[:, 7] *= 20  # an outlier
    errors = []
    for search in (False, True):
        got = quantize_int8(weight, clip_search=search)
        errors.append((weight.double() - reference.dequantize_8bit(got.q, got.scales)).square().sum(1))
    assert (errors[1] <= errors[0] * (1 + 1e-5)).all() and errors[1].sum() < errors[0].sum()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("granularity", ["row", "tensor", "block"])
@pytest.mark.parametrize("n,k", [(1, 1), (37, 300), (128, 128), (300, 129)])
def test_fp8_scales_map_the_largest_value_to_448(
    n: int, k: int, granularity: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random_weight(n, k, device, dtype)
    got = quantize_fp8(weight, granularity)
    shape = {"row": (n, 1), "tensor": (1, 1), "block": (-(-n // 128), -(-k // 128))}[granularity]
    assert got.q.dtype == torch.float8_e4m3fn and got.q.shape == (n, k)
    assert got.scales.dtype == torch.float32 and got.scales.shape == shape
    height, width = {"row": (1, k), "tensor": (n, k), "block": (128, 128)}[granularity]
    for i, row in enumerate(weight.split(height)):
        for j, block in enumerate(row.split(width, 1)):
            assert got.scales[i, j].item() == pytest.approx(block.abs().max().item() / 448, rel=1e-6)
    every = got.scales.double().repeat_interleave(height, 0)[:n].repeat_interleave(width, 1)[:, :k]
    distance = (weight.double() - got.q.double() * every).abs()
    # Three bits of mantissa; below 2^-6, multiples of 2^-9.
    assert (distance <= torch.maximum(weight.double().abs() * 2.0**-4, every * 2.0**-10) * (1 + 2.0**-20)).all()
    assert got.relative_error == pytest.approx((distance.norm() / weight.double().norm()).item(), rel=1e-5, abs=1e-7)
    monkeypatch.setitem(quantizer._CHUNK_ELEMENTS, device, 5 * k)
    chunked = quantize_fp8(weight, granularity)
    assert torch.equal(chunked.q.view(torch.int8), got.q.view(torch.int8)) and torch.equal(chunked.scales, got.scales)


@pytest.mark.parametrize("magnitude", [0.0, 1e-44, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("quantize", EIGHT_BITS, ids=["int8", "row", "tensor", "block"])
def test_eight_bits_of_extreme_magnitudes(quantize: Any, magnitude: float, device: str) -> None:
    """Everything stays finite, zeros stay zero, and nothing overflows to the NaN of e4m3."""
    weight = torch.full((5, 40), magnitude, device=device)
    weight[1::2] *= -1
    got = quantize(weight)
    dense8 = reference.dequantize_8bit(got.q, got.scales)
    assert dense8.isfinite().all() and got.scales.isfinite().all() and (got.scales > 0).all()
    assert ((dense8 - weight.double()).abs() <= magnitude * 2.0**-4 + 1e-37).all()


@pytest.mark.parametrize("quantize", EIGHT_BITS, ids=["int8", "row", "tensor", "block"])
def test_eight_bits_of_weights_that_are_not_finite(quantize: Any, device: str) -> None:
    weight = random_weight(4, 64, device)
    weight[2, 3] = float("nan")
    with pytest.raises(ValueError, match=r"^model\.layer: the weight \[4, 64\].*holds NaN or Inf"):
        quantize(weight, name="model.layer")
    with pytest.raises(ValueError, match=r"^w: a scale of the weight.*overflows torch.float32"):
        quantize(torch.full((2, 4), 1e300, dtype=torch.float64, device=device), name="w")


@pytest.mark.parametrize("group_size, k", [(32, 100), (64, 128), (-1, 77)])
def test_row_sums(group_size: int, k: int, device: str) -> None:
    got = quantize_int4(random_weight(9, k, device), group_size, symmetric=False, scale_dtype=torch.bfloat16)
    for zeros in (got.zeros, None):
        expected = reference.dequantize(got.q, got.scales, zeros, group_size).sum(1)
        sums = quantizer.row_sums(got.q, got.scales, 8 if zeros is None else zeros, group_size)
        assert sums.dtype == torch.float32
        torch.testing.assert_close(sums.double(), expected, rtol=2.0**-23, atol=1e-12)
