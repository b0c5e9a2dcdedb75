"""quantize_groups, quantize_blocks and quantize_fp4: weight quantizers, bit for bit against torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from groups_by_torch import groups_by_torch
from groups_by_torch import search as search_by_torch
from ops_schemes import DTYPES
from qao.ops import reference
from qao.ops.serial import SERIAL_VALUES
from qao.quant_primitives import fp4 as quantizer_fp4
from qao.quant_primitives import fp8 as quantizer_fp8
from qao.quant_primitives import integer as quantizer
from qao.quant_primitives.fp8 import SCALE_BLOCK
from qao.quant_primitives.integer import _CLIP_FACTORS, _INT4, _INT8
from qao.schemes import Fp4WeightOnly
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

OPS = torch.ops.qao
UTILITIES = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
F8 = torch.float8_e4m3fn
FORMATS = [(_INT4, True), (_INT4, False), (_INT8, True)]
SHAPES = [(1, 1), (5, 77), (37, 300), (16, 1056)]

every_format = pytest.mark.parametrize("codes, symmetric", FORMATS, ids=["int4", "int4-zeros", "int8"])


def random_weight(n: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """With a row of zeros, an outlier, and values of every magnitude."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)) * 0.02
    weight[n // 3] = 0
    weight[n // 2, k // 2] = 3
    weight[n - 1] *= torch.logspace(-12, 2, k)
    return weight.to(dtype)


def groups_of(weight: Tensor, group_size: int, codes: Any, *options: Any) -> tuple[Tensor, ...]:
    """The operator on arguments of ``groups_by_torch``."""
    symmetric, scale_dtype, factors, importance, *rest = (*options, None) if len(options) == 3 else options
    numbers = group_size, codes.dtype, symmetric, scale_dtype, factors
    return OPS.quantize_groups(weight, importance, *numbers, *rest)  # type: ignore[no-any-return]


def on_cpu(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.cpu() for tensor in tensors)


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.every_isa
@every_format
@pytest.mark.parametrize("n, k", SHAPES)
def test_round_to_nearest_has_the_bits_of_torch(n: int, k: int, codes: Any, symmetric: bool, device: str) -> None:
    for dtype, scale_dtype, group_size in itertools.product(DTYPES, DTYPES, (32, 64, 128, 256, -1)):
        weight = random_weight(n, k, dtype)
        rest = group_size, codes, symmetric, scale_dtype, (1.0,), None
        got, expected = on_cpu(groups_of(weight.to(device), *rest)), groups_by_torch(weight, *rest)
        assert same(got[:3], expected[:3])
        # torch may fuse a product and a difference: each is off by no more than 2^-24 of its value.
        torch.testing.assert_close(got[3], expected[3], rtol=1e-5, atol=2.0**-46 * expected[3][1].item())


def sum_of_lanes(values: Tensor) -> Tensor:
    """float32 [..., size] to [...] in the operator's order: sixteen lanes, then their halves onto each other."""
    lanes = values.new_zeros(*values.shape[:-1], 16)
    for part in torch.nn.functional.pad(values, (0, -values.shape[-1] % 16)).split(16, -1):
        lanes = lanes + part
    while lanes.shape[-1] > 1:
        low, high = lanes.chunk(2, -1)
        lanes = low + high
    return lanes.squeeze(-1)


def search(
    group: Tensor, codes: Any, symmetric: bool, scale_dtype: torch.dtype, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, scale, zero and squared error of one group of every row, [N, size]: every factor, the first best one."""
    best: tuple[Tensor, ...] | None = None
    for factor in _CLIP_FACTORS:
        scale, zero = search_by_torch(group[:, None], codes, symmetric, scale_dtype, (factor,))
        scale, zero = scale[:, 0], zero[:, 0]
        steps = (group / scale).round()
        clipped = torch.minimum(torch.maximum(steps, codes.lowest - zero), codes.highest - zero)
        product = clipped * scale
        difference = group - product
        squares = difference * difference
        loss, error = sum_of_lanes(squares * weights), sum_of_lanes(squares)
        tried = (clipped + zero).to(codes.dtype), scale[:, 0], zero[:, 0], error, loss
        if best is None:
            best = tried
        else:
            better = tried[4] < best[4]
            rows = [better[:, None], better, better, better, better]
            best = tuple(torch.where(row, new, old) for row, new, old in zip(rows, tried, best, strict=True))
    assert best is not None
    return best[0], best[1], best[2], best[3]


@pytest.mark.every_isa
@every_format
@pytest.mark.parametrize("n, k", SHAPES)
def test_the_search_takes_the_first_best_factor(n: int, k: int, codes: Any, symmetric: bool, device: str) -> None:
    """Bit by bit: the order of sums is the same for every instruction set and for GPUs."""
    for dtype, group_size in ((torch.float32, 32), (torch.bfloat16, 128), (torch.float16, -1)):
        weight = random_weight(n, k, dtype)
        size = k if group_size == -1 else group_size
        importance = torch.rand(k, generator=torch.Generator().manual_seed(k))
        parts = zip(weight.float().split(size, 1), importance.split(size), strict=True)
        groups = [search(part, codes, symmetric, dtype, weights) for part, weights in parts]
        rest = group_size, codes, symmetric, dtype, _CLIP_FACTORS, importance.to(device)
        q, scales, zeros, squares = on_cpu(groups_of(weight.to(device), *rest))
        assert torch.equal(q, torch.cat([group[0] for group in groups], 1))
        assert torch.equal(scales, torch.stack([group[1] for group in groups], 1).to(dtype))
        assert torch.equal(zeros, torch.stack([group[2] for group in groups], 1).to(dtype))
        error = norm = torch.zeros(n, dtype=torch.float64)
        for group, part in zip(groups, weight.float().split(size, 1), strict=True):
            error, norm = error + group[3], norm + sum_of_lanes(part * part)
        # float64 sums in another order on a GPU.
        exact = [sum(error.tolist()), sum(norm.tolist())]
        assert squares.tolist() == (exact if device == "cpu" else pytest.approx(exact, rel=n * k * 2.0**-53))


@pytest.mark.every_isa
@pytest.mark.parametrize("n, k", [*SHAPES, (16, 1040)])
def test_grids_have_the_bits_of_torch(n: int, k: int, device: str) -> None:
    for scale_dtype, group_size in itertools.product(DTYPES, (32, 128, -1)):
        generator = torch.Generator().manual_seed(k)
        weight = (torch.randint(0, 16, (n, k), generator=generator) - 7.4) * torch.rand(n, 1, generator=generator)
        rest = group_size, _INT4, False, scale_dtype, (1.0,), None
        got, expected = on_cpu(groups_of(weight.to(device), *rest)), groups_by_torch(weight, *rest)
        assert same(got[:3], expected[:3])
        whole = got[2][:, : k // group_size] if group_size > 0 else got[2]
        assert k < 128 or (group_size == -1 and k % 16) or (whole != whole.round()).any()  # grids there are


@every_format
def test_the_search_is_as_good_as_that_of_torch(codes: Any, symmetric: bool) -> None:
    """Sums in another order may select another factor, with an error that differs only by float32 rounding."""
    weight = random_weight(64, 1024)
    arguments = weight, 128 if codes is _INT4 else -1, codes, symmetric, torch.float32, _CLIP_FACTORS
    errors = []
    for quantize in (groups_of, groups_by_torch):
        q, scales, zeros, _ = quantize(*arguments)
        difference = weight.double() - reference.dequantize(q, scales, zeros, arguments[1])
        errors.append(difference.square().unflatten(1, (scales.shape[1], -1)).sum(-1))
    torch.testing.assert_close(*errors, rtol=1e-5, atol=0)


@pytest.mark.every_isa
@pytest.mark.parametrize("granularity", ["row", "tensor", "block"])
@pytest.mark.parametrize("n, k", [*SHAPES, (300, 129)])
def test_blocks_have_the_bits_of_torch(n: int, k: int, granularity: str) -> None:
    for dtype in DTYPES:
        weight = random_weight(n, k, dtype)
        got, expected = (f(weight, granularity) for f in (quantizer_fp8._blocks_on_cpu, quantizer_fp8._blocks_by_torch))
        assert same(got[:2], expected[:2])
        torch.testing.assert_close(got[2], expected[2], rtol=1e-5, atol=1e-12)


@pytest.mark.every_isa
@pytest.mark.parametrize("group_size", [32, 16], ids=["mxfp4", "nvfp4"])
@pytest.mark.parametrize("n, k", [*SHAPES, (300, 129)])
def test_fp4_has_the_bits_of_torch(n: int, k: int, group_size: int) -> None:
    """Of weights small, large, zero of either sign, on a grid of sixteen steps, and of rows far apart."""
    made = random_weight(n, k)
    grid = torch.randint(-8, 9, (n, k), generator=torch.Generator().manual_seed(n)) / 4
    for weight in (
        *(made.to(dtype) for dtype in DTYPES),
        *(made * scale for scale in (1e-38, 1e-42, 1e18)),
        *(grid, -torch.zeros(n, k), made * torch.logspace(-30, 0, n)[:, None]),
    ):
        got, expected = (f(weight, group_size) for f in (OPS.quantize_fp4, quantizer_fp4._by_torch))
        assert same(got[:3], expected[:3])
        torch.testing.assert_close(got[3], expected[3], rtol=1e-5, atol=0)


@pytest.mark.parametrize("group_size", [32, 16], ids=["mxfp4", "nvfp4"])
def test_fp4_takes_the_better_of_its_scales(group_size: int, device: str) -> None:
    """Compared with both in float64, with codes found by distance."""
    weight = random_weight(37, 320).to(device)
    result = quantizer_fp4.quantize_fp4(weight, "mxfp4" if group_size == 32 else "nvfp4")
    groups = weight.cpu().double().unflatten(1, (-1, group_size))
    largest = groups.abs().amax(-1)
    if group_size == 32:
        exponent = torch.where(largest > 0, largest.log2().floor() - 2, 0)
        steps = (2.0**exponent, 2.0 ** (exponent + 1))
    else:
        assert result.zeros is not None
        divisor = result.zeros.cpu().double()
        tried = ((largest * divisor / code).float().clamp(max=448).to(F8).double() for code in (6, 4))
        steps = tuple(scale / divisor for scale in tried)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = torch.cat((values, -values))
    errors = []
    for step in steps:
        distances = (groups[..., None] - step[..., None, None] * values).square()
        errors.append(distances.amin(-1).sum(-1))
    found = reference.dequantize_fp4(result.q, result.scales, result.zeros, group_size).cpu() - weight.cpu().double()
    error = found.square().unflatten(1, (-1, group_size)).sum(-1)
    # Differences of float32 values, each rounded to 2^-24 of the value.
    torch.testing.assert_close(error, torch.minimum(*errors), rtol=1e-5, atol=0)
    assert (errors[0] < errors[1]).any() and (errors[1] < errors[0]).any()


@pytest.mark.parametrize("rows, columns", [(1, 100), (3, 50), (7, 1), (1000, 1000)])
def test_blocks_of_any_size(rows: int, columns: int) -> None:
    weight = random_weight(20, 100)
    q, scales, squares = OPS.quantize_blocks(weight, rows, columns)
    assert scales.shape == (-(-20 // rows), -(-100 // columns))
    every = scales.double().repeat_interleave(rows, 0)[:20].repeat_interleave(columns, 1)[:, :100]
    for i, strip in enumerate(weight.split(rows)):
        for j, block in enumerate(strip.split(columns, 1)):
            largest = max(block.abs().max().item() / 448, torch.finfo(torch.float32).tiny)
            assert scales[i, j].item() == pytest.approx(largest, rel=2.0**-23)
    distance = (weight.double() - q.double() * every).abs()
    # Three bits of mantissa; below 2^-6, multiples of 2^-9.
    assert (distance <= torch.maximum(weight.double().abs() * 2.0**-4, every * 2.0**-10) * (1 + 2.0**-20)).all()
    torch.testing.assert_close(squares[0], distance.square().sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(squares[1], weight.double().square().sum(), rtol=1e-6, atol=0)


@every_format
def test_threads_do_not_change_a_bit(codes: Any, symmetric: bool) -> None:
    """The rows of a thread are random; 300 rows of 1056 are ten pieces."""
    weight = random_weight(300, 1056)
    results = []
    for count in (1, 2, 5):
        with threads(count):
            groups = OPS.quantize_groups(weight, None, -1, codes.dtype, symmetric, torch.float32, _CLIP_FACTORS)
            results.append(
                (*groups, *OPS.quantize_blocks(weight, SCALE_BLOCK, SCALE_BLOCK), *OPS.quantize_fp4(weight, 16))
            )
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_views_are_read_where_they_lie(device: str) -> None:
    weight = random_weight(64, 96).to(device)
    for view in (weight.t(), weight[1::2, 3:35], weight[:, ::3], weight[:1].expand(5, -1)):
        for quantize in (
            lambda w: OPS.quantize_groups(w, None, 32, torch.uint8, False, torch.float32, [1.0]),
            lambda w: OPS.quantize_blocks(w.cpu(), 2, 5),
            lambda w: OPS.quantize_fp4(w.cpu(), 16),
        ):
            assert same(quantize(view), quantize(view.contiguous()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_squares_tell_of_values_that_are_not_finite(value: float, device: str) -> None:
    weight = random_weight(8, 64)
    weight[3, 40] = value
    groups = OPS.quantize_groups(weight.to(device), None, 32, torch.uint8, False, torch.float32, _CLIP_FACTORS)
    assert not groups[3][1].isfinite()
    assert not OPS.quantize_blocks(weight, 1, 64)[2][1].isfinite()
    assert not any(OPS.quantize_fp4(weight, size)[3][1].isfinite() for size in (16, 32))


class _Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += any(isinstance(one, Tensor) and one.numel() > SERIAL_VALUES for one in args)
        return func(*args, **(kwargs or {}))


def test_a_weight_is_quantized_by_few_calls() -> None:
    """A call of torch over more than it gives one thread is a parallel region, which waits for every thread's core."""
    weight = random_weight(2048, 512, torch.bfloat16)
    for quantize in (
        lambda: quantizer.quantize_int4(weight, 128, symmetric=False, scale_dtype=torch.bfloat16),
        lambda: quantizer.quantize_int8(weight),
        lambda: quantizer_fp8.quantize_fp8(weight, "block"),
        lambda: Fp4WeightOnly("mxfp4").quantize(weight),
        lambda: Fp4WeightOnly("nvfp4").quantize(weight),
    ):
        with _Count() as count:
            quantize()
        assert count.calls <= 16


def test_opcheck() -> None:
    for dtype in DTYPES:
        weight = random_weight(9, 70, dtype)
        groups = (32, torch.uint8, False, torch.float16, [1.0, 0.9])
        for arguments in ((None, *groups), (torch.ones(70), *groups), (None, *groups, False, 2)):
            torch.library.opcheck(OPS.quantize_groups.default, (weight, *arguments), test_utils=UTILITIES)
        rows = (weight, None, -1, torch.int8, True, torch.float32, [1.0])
        torch.library.opcheck(OPS.quantize_groups.default, rows, test_utils=UTILITIES)
        torch.library.opcheck(OPS.quantize_blocks.default, (weight, 4, 32), test_utils=UTILITIES)
        for size in (16, 32):
            torch.library.opcheck(OPS.quantize_fp4.default, (weight, size), test_utils=UTILITIES)


GROUPS = {
    "weight": torch.ones(4, 64),
    "importance": None,
    "group_size": 32,
    "dtype": torch.uint8,
    "symmetric": False,
    "scale_dtype": torch.float32,
    "factors": [1.0],
}


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"weight": torch.ones(64)}, r"weight must have shape \[N, K\]"),
        ({"weight": torch.ones(0, 64)}, "N and K at least 1"),
        ({"weight": torch.ones(4, 0)}, "N and K at least 1"),
        ({"weight": torch.ones(4, 64, dtype=torch.float64)}, "weight must be float32, float16 or bfloat16"),
        ({"weight": torch.ones(4, 64, dtype=torch.int8)}, "weight must be float32, float16 or bfloat16"),
        ({"group_size": 48}, "group_size must be 32, 64, 128, 256"),
        ({"group_size": 0}, "group_size must be"),
        ({"group_size": -2}, "group_size must be"),
        ({"dtype": torch.int8}, "dtype must be uint8"),
        ({"dtype": torch.int32, "symmetric": True}, "dtype must be uint8"),
        ({"scale_dtype": torch.int8}, "scale_dtype must be"),
        ({"factors": []}, "factors must be positive and finite, at least one"),
        ({"factors": [1.0, 0.0]}, "factors must be positive"),
        ({"factors": [float("nan")]}, "factors must be positive"),
        ({"factors": [float("inf")]}, "factors must be positive"),
        ({"importance": torch.ones(63)}, r"importance must be float32 \[K\]"),
        ({"importance": torch.ones(64, dtype=torch.float64)}, "importance must be float32"),
        ({"importance": torch.ones(128)[::2]}, "importance must be contiguous"),
        ({"rounds": -1}, "rounds must not be negative"),
    ],
)
def test_groups_of_bad_arguments(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^qao::quantize_groups: .*{message}.*Got "):
        OPS.quantize_groups(**(GROUPS | wrong))


@pytest.mark.parametrize("rows, columns", [(0, 4), (4, 0), (-1, 64)])
def test_blocks_of_bad_arguments(rows: int, columns: int) -> None:
    with pytest.raises(RuntimeError, match="^qao::quantize_blocks: rows and columns of a block must be at least"):
        OPS.quantize_blocks(torch.ones(4, 64), rows, columns)


@pytest.mark.parametrize("group_size", [0, -1, 64])
def test_fp4_of_bad_arguments(group_size: int) -> None:
    with pytest.raises(RuntimeError, match=r"^qao::quantize_fp4: group_size must be 32 \(MXFP4\) or 16 \(NVFP4\)"):
        OPS.quantize_fp4(torch.ones(4, 64), group_size)


def test_what_a_gpu_does_not_take() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    with pytest.raises(RuntimeError, match="weight must be on the CPU"):
        OPS.quantize_blocks(torch.ones(4, 64, device="cuda"), 1, 64)
    with pytest.raises(RuntimeError, match="weight must be on the CPU"):
        OPS.quantize_fp4(torch.ones(4, 64, device="cuda"), 32)
    with pytest.raises(RuntimeError, match="on a GPU there may be 64 factors"):
        OPS.quantize_groups(**(GROUPS | {"weight": torch.ones(4, 64, device="cuda"), "factors": [1.0] * 65}))
    with pytest.raises(RuntimeError, match="importance and weight are on different devices"):
        OPS.quantize_groups(**(GROUPS | {"weight": torch.ones(4, 64, device="cuda"), "importance": torch.ones(64)}))
