"""int8_int4 with integer_scales and fp8_int4 with power_of_two_scales: two-level scales."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from ops_schemes import DTYPES, SHORT
from qao.quant_primitives.two_level import POWERS_OF_TWO, WHOLE_NUMBERS
from torch import Tensor, nn

INT8, FP8 = qao.Int8DynamicActivationInt4Weight, qao.Float8DynamicActivationInt4Weight
every_class = pytest.mark.parametrize("kind", [INT8, FP8], ids=["int8_int4", "fp8_int4"])
GROUPS = (32, 64, 128, 256)


def scheme_of(kind: Any, group_size: int, **options: object) -> Any:
    return kind(group_size, True, **{kind.factors.option: True}, **options)


def mm(kind: Any, x: Tensor, packed: Any, row_scales: Tensor, *sizes: int) -> Tensor:
    sums = (None,) if kind is INT8 else ()
    operator = getattr(torch.ops.qao, f"{kind.word}_mm")
    return operator(x, packed.qweight, packed.scales, None, *sums, row_scales, *sizes)  # type: ignore[no-any-return]


def are_factors(kind: Any, scales: Tensor, rows: Tensor) -> bool:
    times = scales.cpu().double() / rows.cpu().double()[:, None]
    if kind is INT8:
        return bool(((times == times.round()) & (times != 0) & (times >= -15) & (times <= 16)).all())
    powers = times.abs().log2()
    return bool(((powers == powers.round()) & (powers >= -14) & (powers <= 5)).all())


def weight_of(n: int, k: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows and columns of different sizes, a group of zeros, a row of zeros."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(n, k, generator=g) * torch.rand(k, generator=g).add(0.2) * torch.rand(n, 1, generator=g) * 0.1
    weight[1, :256] = 0
    weight[2] = 0
    weight[3] = weight[3].abs()
    return weight.to(device, dtype)


@every_class
@pytest.mark.parametrize("clip_search", [True, False])
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_scales_are_factors_times_that_of_their_row(
    kind: Any, group_size: int, dtype: torch.dtype, clip_search: bool, device: str
) -> None:
    scheme = scheme_of(kind, group_size, scale_dtype=dtype, clip_search=clip_search)
    weight = weight_of(40, 1000, device)
    packed = scheme.quantize(weight)
    _, scales, zeros = scheme.unpack(packed.qweight, packed.scales, 40, 1000)
    assert zeros is None and packed.row_scales is not None and scales.dtype == dtype
    assert packed.row_scales.dtype == torch.float32 and packed.row_scales.shape == (40,)
    assert are_factors(kind, scales, packed.row_scales)


@every_class
@pytest.mark.parametrize("scale", [2.0**-24, 1e-6, 1e-3, 1.0, 1000.0])
def test_scales_of_any_size_are_exact_in_every_dtype(kind: Any, scale: float, device: str) -> None:
    for dtype in DTYPES:
        packed = scheme_of(kind, 64, scale_dtype=dtype).quantize(weight_of(33, 200, device) * scale)
        assert packed.row_scales is not None and packed.row_scales.isfinite().all() and (packed.row_scales > 0).all()
        assert packed.relative_error is not None
        assert packed.relative_error < 0.2 or (dtype == torch.float16 and scale < 1e-5)


@every_class
@pytest.mark.parametrize("clip_search", [True, False])
@pytest.mark.parametrize("group_size", GROUPS)
def test_the_error_is_little_larger_than_with_any_scales(
    kind: Any, group_size: int, clip_search: bool, device: str
) -> None:
    weight = weight_of(64, 1024, device)
    plain_scheme = kind(group_size, True, clip_search=clip_search)
    scheme, alike = scheme_of(kind, group_size, clip_search=clip_search), torch.ones(1024)
    plain, packed = plain_scheme.quantize(weight, importance=alike), scheme.quantize(weight, importance=alike)
    assert packed.relative_error is not None and plain.relative_error is not None
    dense = scheme.dequantize(packed.qweight, packed.scales, 64, 1024, torch.float32).double()
    error = ((weight.double() - dense).norm() / weight.double().norm()).item()
    assert packed.relative_error == pytest.approx(error, rel=1e-4)
    # Integer factors are off by at most half of 1/16 of the row's largest, usually less: a step that is 3% too long.
    # Powers of two are off by a factor of the root of two at most.
    assert packed.relative_error < (1.05 if kind is INT8 else 1.3) * plain.relative_error


@pytest.mark.parametrize("m", [1, 7, 40, 300])
@pytest.mark.parametrize("group_size", GROUPS)
def test_a_layer_multiplies_with_the_weight_it_has(group_size: int, m: int, device: str) -> None:
    for symmetric_activations in (True, False):
        linear = nn.Linear(416, 72, device=device)
        scheme = scheme_of(INT8, group_size, symmetric_activations=symmetric_activations)
        layer = qao.QuantLinear.from_linear(linear, scheme)
        assert layer.row_scales is not None and "integer scales" in repr(layer)
        x = torch.randn(m, 416, device=device)
        q, scales, zeros = torch.ops.qao.int8_quantize(x, symmetric_activations)
        seen = (q.double() - zeros.double()) * scales.double()
        dense = layer.dequantize(torch.float64)
        assert layer.bias is not None
        expected = seen @ dense.t() + layer.bias.double()
        # float32 sums of numbers up to 128 and of their zero points, which cancel
        size = (q.double().abs() + 128).mul(scales.double()) @ dense.abs().t() + 1
        assert ((layer(x).double() - expected).abs() <= 2.0**-20 * size).all()
        plain = torch.ops.qao.int8_int4_mm(
            x, layer.qweight, layer.scales, layer.bias, layer.weight_sums, None, 72, 416, group_size
        )
        assert ((layer(x) - plain).double().abs() <= 2.0**-20 * size).all()


# The last two cover split-K tiles on Hopper, and the second half of 256 tokens.
@pytest.mark.parametrize("m, n, k", [(m, 200, 416) for m in (1, 7, 40, 128, 300)] + [(33, 1, 4128), (300, 17, 4128)])
@pytest.mark.parametrize("group_size", GROUPS)
def test_a_layer_of_e4m3_multiplies_with_the_weight_it_has(
    group_size: int, m: int, n: int, k: int, device: str
) -> None:
    layer = qao.QuantLinear.from_linear(nn.Linear(k, n, device=device), scheme_of(FP8, group_size))
    assert layer.row_scales is not None and "power of two scales" in repr(layer)
    x = torch.randn(m, k, device=device)
    q, scales = torch.ops.qao.fp8_quantize(x, None, -1)
    seen, dense = q.view(torch.float8_e4m3fn).double() * scales.double(), layer.dequantize(torch.float64)
    assert layer.bias is not None
    expected = seen @ dense.t() + layer.bias.double()
    # Tensor cores truncate products, by this fraction of the root of their summed squares (docs/kernels/sm90_ws.md).
    size = (seen.square() @ dense.square().t()).sqrt() + 2.0**-10
    assert ((layer(x).double() - expected).abs() <= 2.0**-9 * size).all()


@pytest.mark.parametrize("m, n, k", [(m, 200, 416) for m in (1, 40, 128, 190, 300)] + [(33, 1, 4128), (300, 17, 4128)])
@pytest.mark.parametrize("group_size", [-1, 32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_fast_accumulation_is_near(dtype: torch.dtype, group_size: int, m: int, n: int, k: int, device: str) -> None:
    """The tensor cores' short accumulator keeps 13 bits, over 32 columns per instruction; enabled by an argument."""
    scheme = scheme_of(FP8, group_size, fast_accum=True)
    layer = qao.QuantLinear.from_linear(nn.Linear(k, n, device=device, dtype=dtype), scheme)
    assert layer._constants[-2:] == (False, True) and "fast accumulation" in repr(layer)
    x = torch.randn(m, k, device=device, dtype=dtype)
    q, scales = torch.ops.qao.fp8_quantize(x, None, -1)
    seen, dense = q.view(torch.float8_e4m3fn).double() * scales.double(), layer.dequantize(torch.float64)
    assert layer.bias is not None
    y, expected = layer(x), seen @ dense.t() + layer.bias.double()
    bound = k / 32 * 2.0**-13 * (seen.abs() @ dense.abs().t()) + torch.finfo(dtype).eps * expected.abs()
    assert ((y.double() - expected).abs() <= bound).all()


def test_fast_accumulation_is_for_scales_of_rows() -> None:
    with pytest.raises(ValueError, match="fast_accum must be False unless power_of_two_scales=True"):
        FP8(128, True, fast_accum=True)
    with pytest.raises(ValueError, match="fast_accum"):
        FP8(-1, False, fast_accum=True)
    with pytest.raises(TypeError, match="fast_accum must be True or False"):
        FP8(-1, True, fast_accum=1)
    scheme = scheme_of(FP8, 64, fast_accum=True)
    assert qao.schemes.scheme_from_dict(scheme.to_dict()) == scheme
    assert "fast_accum" not in scheme_of(FP8, 64).to_dict()


@every_class
def test_one_group_a_row_needs_none(kind: Any, device: str) -> None:
    weight = weight_of(40, 256, device)
    for group_size in (-1, 256):
        packed = scheme_of(kind, group_size).quantize(weight)
        assert packed.row_scales is None
        assert torch.equal(packed.qweight, kind(group_size, True).quantize(weight).qweight)


@every_class
@pytest.mark.parametrize("m", [5, 64, 300])
def test_wrong_row_scales_do_no_harm(kind: Any, m: int, device: str) -> None:
    packed = scheme_of(kind, 64).quantize(weight_of(40, 320, device))
    x = torch.randn(m, 320, device=device)
    for wrong in (0.0, -1.0, 1e-30, float("inf"), float("nan")):
        rows = torch.full((40,), wrong, device=device)
        y = mm(kind, x, packed, rows, 40, 320, 64)
        assert y.shape == (m, 40)


@every_class
def test_errors_name_what_is_wrong(kind: Any) -> None:
    option = kind.factors.option
    with pytest.raises(ValueError, match=rf"{option} must be False unless symmetric=True"):
        kind(**{option: True})
    with pytest.raises(TypeError, match=f"{option} must be True or False"):
        kind(symmetric=True, **{option: 1})
    packed = scheme_of(kind, 32).quantize(weight_of(40, 64, "cpu"))
    x = torch.randn(2, 64)
    for rows in (torch.ones(39), torch.ones(40, dtype=torch.float64), torch.ones(40, 1)):
        with pytest.raises(RuntimeError, match=r"int4_mm: row_scales must be float32 of shape \[out_features\]"):
            mm(kind, x, packed, rows, 40, 64, 32)
    asymmetric = kind(32).quantize(weight_of(40, 64, "cpu"))
    with pytest.raises(RuntimeError, match="row_scales are for a weight without zero points"):
        mm(kind, x, asymmetric, torch.ones(40), 40, 64, 32)
    plain = kind(symmetric=True)
    q, scales, _ = plain.unpack(*plain.quantize(weight_of(40, 256, "cpu"))[:2], 40, 256)
    expected = re.escape(f"scales of row 0 of 40 are not {kind.factors.allowed} times one scale, as {option}")
    with pytest.raises(ValueError, match=expected):
        scheme_of(kind, 128).pack(q, scales)


def test_row_scales_are_found_again() -> None:
    units = torch.tensor([8.0, 9, 13, 15]).mul(2.0**-12)
    whole = torch.tensor([[16, 1, -15, 3], [-15, 2, 4, 8], [7, -7, 7, 7], [2, 4, 6, 10]])
    powers = torch.tensor([[1, 2, -8, 0.5], [-4, 4, 4, 4], [2.0**-9, 16, 1, 1], [0.25, 0.5, -0.25, 0.125]])
    for kind, times in ((INT8, whole), (FP8, powers)):
        scales = times * units[:, None]
        for dtype in DTYPES:
            found = kind.factors.row_scales(scales.to(dtype), "a scheme")
            assert are_factors(kind, scales, found)
    with pytest.raises(ValueError, match="row 1 of 2"):
        WHOLE_NUMBERS.row_scales(torch.tensor([[1.0, 2.0], [1.0, 17.0]]), "a scheme")
    for wrong in (3.0, 2.0**-15, 0.0, float("nan")):
        with pytest.raises(ValueError, match="row 1 of 2"):
            POWERS_OF_TWO.row_scales(torch.tensor([[1.0, 2.0], [1.0, wrong]]), "a scheme")


@every_class
def test_a_layer_is_saved_and_loaded_and_updated(kind: Any, tmp_path: Path, device: str) -> None:
    scheme = scheme_of(kind, 64)
    model = nn.Sequential(nn.Linear(256, 48), nn.Linear(48, 256)).to(device)
    weight = model[0].weight.detach().clone()
    qao.quantize_(model, scheme)
    qao.save(model, tmp_path / "model.safetensors")
    fresh = nn.Sequential(nn.Linear(256, 48), nn.Linear(48, 256)).to(device)
    qao.load(tmp_path / "model.safetensors", fresh)
    x = torch.randn(33, 256, device=device)
    assert torch.equal(model(x), fresh(x)) and fresh[0].row_scales is not None
    assert fresh[0].scheme == scheme and str(scheme).endswith(f", {kind.factors.option.replace('_', ' ')}")
    before = model[0].row_scales.clone()
    model[0].load_float_(weight * 4)
    assert torch.equal(model[0].row_scales, before * 4)


@every_class
def test_calibration_keeps_factors(kind: Any, device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 128)).to(device)
    data = [torch.randn(16, 128, device=device) for _ in range(4)]
    qao.calibrate(model, data, scheme_of(kind, 32))
    for layer in (model[0], model[2]):
        _, scales, _ = layer.scheme.unpack(layer.qweight, layer.scales, *layer.shape)
        assert are_factors(kind, scales, layer.row_scales)


@every_class
@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_have_the_row_scales_of_the_whole(kind: Any, dim: int) -> None:
    from qao.distributed.cut import cut, part

    scheme, sizes = scheme_of(kind, 32), (64, 256)
    packed = scheme.quantize(weight_of(*sizes, "cpu"))
    assert packed.row_scales is not None
    for rank in range(2):
        own = part(scheme, packed, sizes, cut(sizes, dim, scheme.units(*sizes), rank, 2, "a layer"))
        n, k = (32, 256) if dim == 0 else (64, 128)
        _, scales, _ = scheme.unpack(own.qweight, own.scales, n, k)
        expected = packed.row_scales[32 * rank : 32 * rank + 32] if dim == 0 else packed.row_scales
        assert own.row_scales is not None and torch.equal(own.row_scales, expected)
        assert are_factors(kind, scales, expected)


@every_class
def test_the_operator_passes_opcheck_and_has_gradients(kind: Any, device: str) -> None:
    packed = scheme_of(kind, 64).quantize(weight_of(40, 200, device))
    x = torch.randn(3, 200, device=device)
    sums = (None,) if kind is INT8 else ()
    arguments = (x, packed.qweight, packed.scales, None, *sums, packed.row_scales, 40, 200, 64)
    torch.library.opcheck(getattr(torch.ops.qao, f"{kind.word}_mm").default, arguments)
    layer = qao.QuantLinear.from_linear(nn.Linear(200, 40, device=device), scheme_of(kind, 64))
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    expected = layer.dequantize(torch.float64).sum(0).expand(3, -1)
    torch.testing.assert_close(x.grad.double(), expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
