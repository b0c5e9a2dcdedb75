"""int8_int4 with integer_scales: scales of a row that are whole numbers times one scale of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import qao
import torch
from ops_schemes import DTYPES, SHORT
from qao.quantizer_integer import row_scales
from torch import Tensor, nn

PLAIN = qao.Int8DynamicActivationInt4Weight(symmetric=True)
GROUPS = (32, 64, 128, 256)


def scheme_of(group_size: int, **options: object) -> qao.Int8DynamicActivationInt4Weight:
    return qao.Int8DynamicActivationInt4Weight(group_size, True, integer_scales=True, **options)  # type: ignore[arg-type]


def weight_of(n: int, k: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows and columns of different sizes, a group of zeros, a row of zeros."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(n, k, generator=g) * torch.rand(k, generator=g).add(0.2) * torch.rand(n, 1, generator=g) * 0.1
    weight[1, :256] = 0
    weight[2] = 0
    weight[3] = weight[3].abs()
    return weight.to(device, dtype)


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.get)
def test_scales_are_whole_numbers_times_that_of_their_row(group_size: int, dtype: torch.dtype, device: str) -> None:
    scheme = scheme_of(group_size, scale_dtype=dtype)
    weight = weight_of(40, 1000, device)
    packed = scheme.quantize(weight)
    _, scales, zeros = scheme.unpack(packed.qweight, packed.scales, 40, 1000)
    assert zeros is None and packed.row_scales is not None and scales.dtype == dtype
    assert packed.row_scales.dtype == torch.float32 and packed.row_scales.shape == (40,)
    whole = scales.double() / packed.row_scales.double()[:, None]
    assert torch.equal(whole, whole.round()) and (whole != 0).all()
    assert whole.min() >= -15 and whole.max() <= 16


@pytest.mark.parametrize("scale", [2.0**-24, 1e-6, 1e-3, 1.0, 1000.0])
def test_scales_of_any_size_are_exact_in_every_dtype(scale: float, device: str) -> None:
    for dtype in DTYPES:
        packed = scheme_of(64, scale_dtype=dtype).quantize(weight_of(33, 200, device) * scale)
        assert packed.row_scales is not None and packed.row_scales.isfinite().all() and (packed.row_scales > 0).all()
        assert packed.relative_error is not None
        assert packed.relative_error < 0.2 or (dtype == torch.float16 and scale < 1e-5)


@pytest.mark.parametrize("clip_search", [True, False])
@pytest.mark.parametrize("group_size", GROUPS)
def test_the_error_is_little_larger_than_with_any_scales(group_size: int, clip_search: bool, device: str) -> None:
    weight = weight_of(64, 1024, device)
    plain_scheme = qao.Int8DynamicActivationInt4Weight(group_size, True, clip_search=clip_search)
    scheme, alike = scheme_of(group_size, clip_search=clip_search), torch.ones(1024)
    plain, packed = plain_scheme.quantize(weight, importance=alike), scheme.quantize(weight, importance=alike)
    assert packed.relative_error is not None and plain.relative_error is not None
    dense = scheme.dequantize(packed.qweight, packed.scales, 64, 1024, torch.float32).double()
    error = ((weight.double() - dense).norm() / weight.double().norm()).item()
    assert packed.relative_error == pytest.approx(error, rel=1e-4)
    # Scales are off by half of 1/16 of the row's largest at most, mostly less: a step that is 3 % too long.
    assert packed.relative_error < 1.05 * plain.relative_error


@pytest.mark.parametrize("m", [1, 7, 40, 300])
@pytest.mark.parametrize("group_size", GROUPS)
def test_a_layer_multiplies_with_the_weight_it_has(group_size: int, m: int, device: str) -> None:
    for symmetric_activations in (True, False):
        linear = nn.Linear(416, 72, device=device)
        layer = qao.QuantLinear.from_linear(linear, scheme_of(group_size, symmetric_activations=symmetric_activations))
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
            x, layer.qweight, layer.scales, layer.bias, layer.weight_sums, 72, 416, group_size
        )
        assert ((layer(x) - plain).double().abs() <= 2.0**-20 * size).all()


def test_one_group_a_row_needs_none(device: str) -> None:
    weight = weight_of(40, 256, device)
    for group_size in (-1, 256):
        packed, plain = scheme_of(group_size).quantize(weight), PLAIN
        assert packed.row_scales is None
        plain = qao.Int8DynamicActivationInt4Weight(group_size, True)
        assert torch.equal(packed.qweight, plain.quantize(weight).qweight)


@pytest.mark.parametrize("m", [5, 64, 300])
def test_wrong_row_scales_do_no_harm(m: int, device: str) -> None:
    packed = scheme_of(64).quantize(weight_of(40, 320, device))
    x = torch.randn(m, 320, device=device)
    for wrong in (0.0, -1.0, 1e-30, float("inf"), float("nan")):
        rows = torch.full((40,), wrong, device=device)
        y = torch.ops.qao.int8_int4_mm(x, packed.qweight, packed.scales, None, None, 40, 320, 64, rows)
        assert y.shape == (m, 40)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"integer_scales must be False unless symmetric=True"):
        qao.Int8DynamicActivationInt4Weight(integer_scales=True)
    with pytest.raises(TypeError, match="integer_scales must be True or False"):
        qao.Int8DynamicActivationInt4Weight(symmetric=True, integer_scales=1)  # type: ignore[arg-type]
    packed = scheme_of(32).quantize(weight_of(40, 64, "cpu"))
    x, arguments = torch.randn(2, 64), (packed.qweight, packed.scales, None, None, 40, 64, 32)
    mm = torch.ops.qao.int8_int4_mm
    for rows in (torch.ones(39), torch.ones(40, dtype=torch.float64), torch.ones(40, 1)):
        with pytest.raises(RuntimeError, match=r"int8_int4_mm: row_scales must be float32 of shape \[out_features\]"):
            mm(x, *arguments, rows)
    asymmetric = qao.Int8DynamicActivationInt4Weight(32).quantize(weight_of(40, 64, "cpu"))
    with pytest.raises(RuntimeError, match="row_scales are for a weight without zero points"):
        mm(x, asymmetric.qweight, asymmetric.scales, None, None, 40, 64, 32, torch.ones(40))
    q, scales, _ = PLAIN.unpack(*PLAIN.quantize(weight_of(40, 256, "cpu"))[:2], 40, 256)
    with pytest.raises(ValueError, match="scales of row 0 of 40 are no whole numbers from -15 to 16 times one scale"):
        scheme_of(128).pack(q, scales)


def test_row_scales_are_found_again() -> None:
    units = torch.tensor([8.0, 9, 13, 15]).mul(2.0**-12)
    whole = torch.tensor([[16, 1, -15, 3], [-15, 2, 4, 8], [7, -7, 7, 7], [2, 4, 6, 10]])
    scales = whole * units[:, None]
    for dtype in DTYPES:
        found = row_scales(scales.to(dtype), "a scheme")
        times = scales.double() / found.double()[:, None]
        assert torch.equal(times, times.round()) and times.abs().max() <= 16 and times.min() >= -15
    with pytest.raises(ValueError, match="row 1 of 2"):
        row_scales(torch.tensor([[1.0, 2.0], [1.0, 17.0]]), "a scheme")


def test_a_layer_is_saved_and_loaded_and_updated(tmp_path: Path, device: str) -> None:
    scheme = scheme_of(64)
    model = nn.Sequential(nn.Linear(256, 48), nn.Linear(48, 256)).to(device)
    weight = model[0].weight.detach().clone()
    qao.quantize_(model, scheme)
    qao.save(model, tmp_path / "model.safetensors")
    fresh = nn.Sequential(nn.Linear(256, 48), nn.Linear(48, 256)).to(device)
    qao.load(tmp_path / "model.safetensors", fresh)
    x = torch.randn(33, 256, device=device)
    assert torch.equal(model(x), fresh(x)) and fresh[0].row_scales is not None
    assert fresh[0].scheme == scheme and str(scheme).endswith(", integer scales")
    before = model[0].row_scales.clone()
    model[0].load_float_(weight * 4)
    assert torch.equal(model[0].row_scales, before * 4)


def test_calibration_keeps_scales_whole(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 128)).to(device)
    data = [torch.randn(16, 128, device=device) for _ in range(4)]
    qao.calibrate(model, data, scheme_of(32))
    for layer in (model[0], model[2]):
        _, scales, _ = layer.scheme.unpack(layer.qweight, layer.scales, *layer.shape)
        whole = scales.double() / layer.row_scales.double()[:, None]
        assert torch.equal(whole, whole.round()) and whole.abs().max() <= 16


@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_have_the_row_scales_of_the_whole(dim: int) -> None:
    from qao.distributed.cut import cut, part

    scheme, sizes = scheme_of(32), (64, 256)
    packed = scheme.quantize(weight_of(*sizes, "cpu"))
    assert packed.row_scales is not None
    for rank in range(2):
        own = part(scheme, packed, sizes, cut(sizes, dim, scheme.units(*sizes), rank, 2, "a layer"))
        n, k = (32, 256) if dim == 0 else (64, 128)
        _, scales, _ = scheme.unpack(own.qweight, own.scales, n, k)
        expected = packed.row_scales[32 * rank : 32 * rank + 32] if dim == 0 else packed.row_scales
        assert own.row_scales is not None and torch.equal(own.row_scales, expected)
        whole = scales.double() / expected.double()[:, None]
        assert torch.equal(whole, whole.round())


def test_the_operator_passes_opcheck_and_has_gradients(device: str) -> None:
    packed = scheme_of(64).quantize(weight_of(40, 200, device))
    x = torch.randn(3, 200, device=device)
    arguments = (x, packed.qweight, packed.scales, None, None, 40, 200, 64, packed.row_scales)
    torch.library.opcheck(torch.ops.qao.int8_int4_mm.default, arguments)
    layer = qao.QuantLinear.from_linear(nn.Linear(200, 40, device=device), scheme_of(64))
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    expected = layer.dequantize(torch.float64).sum(0).expand(3, -1)
    torch.testing.assert_close(x.grad.double(), expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
