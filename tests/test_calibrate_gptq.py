"""GPTQ against its plain float64 loop, and against rounding to nearest."""

from __future__ import annotations

import pytest
import torch
from qao import (
    Float8DynamicActivationInt4Weight,
    Float8WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
    Scheme,
)
from qao.calibration.choice import quantized
from qao.calibration.gptq import damping_of, gptq
from qao.calibration.grid import Grid
from torch import Tensor

N, K = 24, 320  # three blocks of columns, the last of them short; not all groups divide K

SCHEMES: list[Scheme] = [
    *(
        Int4WeightOnly(group_size=size, symmetric=symmetric)
        for size in (32, 128, 256, -1)
        for symmetric in (False, True)
    ),
    Int8DynamicActivationInt4Weight(group_size=64, symmetric_activations=False),
    Float8DynamicActivationInt4Weight(),
    Int8WeightOnly(),
    Int8DynamicActivationInt8Weight(),
    *(Float8WeightOnly(granularity=shares) for shares in ("row", "tensor", "block")),
]


def data(device: str, k: int = K, tokens: int = 600) -> tuple[Tensor, Tensor]:
    """A weight [N, k] and the mean H [k, k] of inputs that depend on each other, a few of them large."""
    g = torch.Generator().manual_seed(0)
    mixed = torch.randn(tokens, k, generator=g) @ torch.randn(k, k, generator=g) * 0.05
    x = (mixed + torch.randn(tokens, k, generator=g)) * torch.where(torch.arange(k) % 37 == 5, 8.0, 1.0)
    return (torch.randn(N, k, generator=g) * 0.1).to(device), (x.T @ x / tokens).to(device)


def plain(weight: Tensor, hessian: Tensor, grid: Grid, damping: float) -> tuple[Tensor, Tensor]:
    """The loop of the paper, one column at a time with the inverse itself, in float64; codes, and distances to ties."""
    order = hessian.diagonal().argsort(descending=True, stable=True)
    damped = hessian.double() + damping_of(hessian, damping).diag()
    inverse = damped[order][:, order].inverse()
    rest = weight.double().clone()[:, order]
    codes, margins = torch.empty_like(rest), torch.empty_like(rest)
    for j in range(len(order)):
        scales, zeros = (None if t is None else t.double() for t in grid.columns(order[j : j + 1]))
        assert scales is not None
        scale, zero = scales[0], 0 if zeros is None else zeros[0]
        ratio = rest[:, j] / scale + zero
        if grid.limits is None:
            codes[:, j] = ratio.clamp(-448, 448).to(torch.float8_e4m3fn).double()
        else:
            codes[:, j] = ratio.round().clamp(*grid.limits)
        error = rest[:, j] - (codes[:, j] - zero) * scale
        margins[:, j] = (ratio - ratio.floor() - 0.5).abs()
        rest[:, j + 1 :] -= (error / inverse[0, 0])[:, None] * inverse[0, 1:]
        inverse = inverse[1:, 1:] - inverse[1:, :1] * inverse[:1, 1:] / inverse[0, 0]
    back = order.argsort()
    return codes[:, back], margins[:, back]


@pytest.mark.parametrize("wide", [256, 1024])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_blocked_is_the_plain_loop(scheme: Scheme, wide: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same codes, except values so near a tie that float32 may differ, and the rest of their rows."""
    monkeypatch.setattr("qao.calibration.gptq._WIDE", wide)
    weight, hessian = data(device)
    grid = Grid.of(scheme._quantize(weight, "w"), scheme, N, K)
    codes, _ = gptq(weight, hessian, grid)
    expected, margins = plain(weight.cpu(), hessian.cpu(), Grid(*_on_cpu(grid)), 0.01)
    differs = (codes.cpu().double() != expected).any(1)
    if isinstance(scheme, Float8WeightOnly):  # e4m3 rounds some ties differently: few rows differ, and only slightly
        assert differs.float().mean() <= 0.5
        relative = (
            grid.dequantize(codes).cpu() - Grid(*_on_cpu(grid)).dequantize(expected.float())
        ).norm() / weight.norm()
        assert relative < 0.02
    else:
        near = (margins < 1e-4).any(1)
        assert not (differs & ~near).any()
        assert differs.sum() <= 3


def _on_cpu(grid: Grid) -> tuple[Tensor, Tensor | None, int, tuple[int, int] | None]:
    return grid.scales.cpu(), None if grid.zeros is None else grid.zeros.cpu(), grid.size, grid.limits


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_error_under_h(scheme: Scheme, device: str) -> None:
    """Less than that of rounding to nearest, and equal to the packed weight's, group by group in column order."""
    weight, hessian = data(device)
    ((packed, error, of_nearest),) = quantized([weight], hessian, scheme, 0.01, ["w"])
    importance = (hessian.diagonal() + damping_of(hessian, 0.01)).float()
    nearest = scheme.quantize(weight, "w", importance)

    def errors(of: object) -> float:
        restored = scheme.dequantize(of.qweight, of.scales, N, K, torch.float32)  # type: ignore[attr-defined]
        rest, h = (restored - weight).double(), hessian.double()
        whole = weight.double()
        return (((rest @ h) * rest).sum() / ((whole @ h) * whole).sum()).sqrt().item()

    assert errors(packed) == pytest.approx(error, rel=1e-3)
    assert errors(nearest) == pytest.approx(of_nearest, rel=1e-3)
    assert error < 0.9 * errors(scheme.quantize(weight))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", [32, 64, 128, 256, -1])
def test_a_weight_on_a_grid_comes_back(size: int, symmetric: bool, device: str) -> None:
    _, hessian = data(device)
    g = torch.Generator().manual_seed(1)
    groups = 1 if size == -1 else -(-K // size)
    q = torch.randint(0, 16, (N, K), generator=g).float()
    q[:, :: 32 if size == -1 else size] = 0
    q[:, 1 :: 32 if size == -1 else size] = 15
    scales = 2.0 ** torch.randint(-6, -2, (N, groups), generator=g)
    zeros = torch.full_like(scales, 8) if symmetric else torch.randint(0, 16, (N, groups), generator=g).float()
    on_grid = Grid(scales, zeros, K if size == -1 else size, (0, 15)).dequantize(q).to(device)
    scheme = Int4WeightOnly(group_size=size, symmetric=symmetric)
    ((packed, error, _),) = quantized([on_grid], hessian, scheme, 0.01, ["w"])
    assert torch.equal(scheme.dequantize(packed.qweight, packed.scales, N, K, torch.float32), on_grid)
    assert error == 0 and packed.relative_error == 0


def test_columns_without_inputs(device: str) -> None:
    """They are rounded to nearest, and H need not have full rank."""
    weight, hessian = data(device, tokens=40)
    hessian[:, 100:140] = 0
    hessian[100:140] = 0
    scheme = Int4WeightOnly(group_size=64)
    nearest = scheme._quantize(weight, "w")
    codes, _ = gptq(weight, hessian, Grid.of(nearest, scheme, N, K))
    assert torch.equal(codes[:, 100:140].to(torch.uint8), nearest.q[:, 100:140])
    assert not torch.equal(codes.to(torch.uint8), nearest.q)


def test_without_any_inputs(device: str) -> None:
    weight, _ = data(device)
    ((packed, error, _),) = quantized([weight], torch.zeros(K, K, device=device), Int8WeightOnly(), 0.01, ["w"])
    assert error == 0 and torch.equal(packed.qweight, Int8WeightOnly().quantize(weight).qweight)


def test_stacked_layers(device: str) -> None:
    """Rows are independent, so layers with one input may be stacked."""
    weight, hessian = data(device)
    scheme = Int4WeightOnly(group_size=32)
    importance = hessian.diagonal()  # an estimate from the weight would use all rows
    whole, _ = gptq(weight, hessian, Grid.of(scheme._quantize(weight, "w", importance), scheme, N, K))
    for rows in (slice(0, 7), slice(7, N)):
        grid = Grid.of(scheme._quantize(weight[rows], "w", importance), scheme, len(weight[rows]), K)
        part, _ = gptq(weight[rows], hessian, grid)
        assert (part != whole[rows]).float().mean() < 0.01  # other shapes add in another order


def test_kernels_take_it(device: str) -> None:
    """The output of a calibrated layer equals that of its dequantized weight: groups are where kernels expect them."""
    from qao import QuantLinear

    weight, hessian = data(device)
    scheme = Int4WeightOnly(group_size=64)
    ((packed, *_),) = quantized([weight], hessian, scheme, 0.01, ["w"])
    layer = QuantLinear(K, N, scheme, packed, None, torch.float32)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(2)).to(device)
    expected = x.double() @ layer.dequantize(torch.float32).double().t()
    assert (layer(x).double() - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("columns", [1, 31, 33, 128])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
def test_operator(dtype: torch.dtype, columns: int, device: str) -> None:
    """Codes are nearest to the error-compensated values, which are recovered from the results."""
    g, n = torch.Generator().manual_seed(columns), 45
    weight, moved = (torch.randn(columns, n, generator=g) for _ in range(2))
    scales = torch.rand(columns, n, generator=g) + 0.1
    zeros = torch.rand(columns, n, generator=g) * 15 if dtype == torch.uint8 else None
    ratios = torch.randn(columns, columns, generator=g) * 0.1
    given = [None if t is None else t.to(device) for t in (weight, moved, scales, zeros, ratios)]
    codes, errors, rests = torch.ops.qao.gptq_columns(*given, dtype)
    assert codes.dtype == dtype
    stood = (codes.cpu().double() - (0 if zeros is None else zeros.double())) * scales.double()
    values = weight.double() + moved.double() + ratios.double().triu(1).t() @ (weight.double() - stood)
    bound = 1e-5 * (1 + values.abs().max())
    assert (errors.cpu() - (weight - stood)).abs().max() < bound
    assert (rests.cpu() - (values - stood)).abs().max() < bound
    exact = values / scales + (0 if zeros is None else zeros)
    lowest, highest = {torch.uint8: (0, 15), torch.int8: (-127, 127), torch.float8_e4m3fn: (-448, 448)}[dtype]
    exact = exact.clamp(lowest, highest)
    step = 0.5 if dtype != torch.float8_e4m3fn else (exact.abs() * 2**-4).clamp(min=2**-10)
    assert ((codes.cpu().double() - exact).abs() <= step * (1 + 1e-4) + 1e-3 * (dtype != torch.float8_e4m3fn)).all()


def test_operator_under_opcheck(device: str) -> None:
    weight, ratios = torch.randn(7, 20, device=device), torch.zeros(7, 7, device=device)
    arguments = (weight, weight, torch.ones_like(weight), None, ratios, torch.int8)
    torch.library.opcheck(torch.ops.qao.gptq_columns.default, arguments)


def test_operator_refuses() -> None:
    good = {name: torch.ones(4, 8) for name in ("weight", "moved", "scales", "zeros")}
    good |= {"ratios": torch.ones(4, 4), "dtype": torch.uint8}
    for wrong, message in (
        ({"weight": torch.ones(129, 8)}, "weight must have shape"),
        ({"moved": torch.ones(4, 9)}, "the shape of weight"),
        ({"zeros": torch.ones(3, 8)}, "the shape of weight"),
        ({"ratios": torch.ones(4, 5)}, "ratios must have shape"),
        ({"scales": torch.ones(4, 8).half()}, "float32 and contiguous"),
        ({"weight": torch.ones(8, 4).t()}, "float32 and contiguous"),
        ({"dtype": torch.int32}, "dtype must be uint8"),
    ):
        with pytest.raises(RuntimeError, match=f"^qao::gptq_columns: .*{message}"):
            torch.ops.qao.gptq_columns(**(good | wrong))
