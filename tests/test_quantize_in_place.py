"""quantize_weight_: bit by bit what the quantisers of plain tensors and pack_int4 give, on every device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ops_schemes import DTYPES
from qao import operators
from torch import Tensor

OPS = torch.ops.qao
F8 = torch.float8_e4m3fn
SHAPES = [(1, 1), (16, 128), (5, 77), (37, 300), (48, 512), (130, 1056), (3, 20000)]


def random_weight(n: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """With rows of zeros, of one sign, of sixteen steps and of every magnitude, zeros of either sign and an outlier."""
    generator = torch.Generator().manual_seed(n * k)
    weight = torch.randn(n, k, generator=generator) * 0.02
    weight[n // 3] = 0
    weight[n // 2, k // 2] = 3
    weight[n // 4] = weight[n // 4].abs() + 0.01
    weight[n // 5] = (torch.randint(0, 16, (k,), generator=generator) - 7.4) * 0.25
    weight[n - 1] *= torch.logspace(-12, 2, k)
    weight[:, k // 3] *= -0.0
    return weight.to(dtype)


def int4(weight: Tensor, group: int, symmetric: bool, whole: bool, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q, scales, zeros, _ = operators.quantize_groups(
        weight, group, torch.uint8, symmetric, scale_dtype, [1.0], whole_zeros=whole
    )
    return operators.pack_int4(q, scales, None if symmetric else zeros, group)


def in_place(weight: Tensor, like: tuple[Tensor, ...], *told: Any) -> tuple[Tensor, Tensor, Tensor]:
    """q, scales and fault, from tensors that held other numbers."""
    q, scales = (torch.full_like(one.view(torch.int8) if one.dtype == F8 else one, 77) for one in like)
    fault = torch.zeros(1, dtype=torch.int32)
    out = tuple(one.to(weight.device) for one in (q, scales, fault))
    operators.quantize_weight_(weight, *told, *out)
    return out


def same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    pairs = zip(got, expected, strict=True)
    return all(torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("group", [32, 64, 128, 256, -1])
def test_int4(n: int, k: int, group: int, device: str) -> None:
    kinds = [(True, False), (False, False), (False, True)]
    for dtype, scale_dtype, (symmetric, whole) in itertools.product(DTYPES, DTYPES, kinds):
        weight = random_weight(n, k, dtype)
        expected = int4(weight, group, symmetric, whole, scale_dtype)
        *got, fault = in_place(weight.to(device), expected, torch.uint8, 1, group, symmetric, whole)
        assert same(tuple(got), expected), (dtype, scale_dtype, symmetric, whole)
        assert not fault.item()


@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes(n: int, k: int, dtype: torch.dtype, device: str) -> None:
    weight = random_weight(n, k, dtype)
    q, scales, _, _ = operators.quantize_groups(weight, k, torch.int8, True, torch.float32, [1.0])
    expected = q, scales.flatten()
    *got, fault = in_place(weight.to(device), expected, torch.int8, 1, k, True, False)
    assert same(tuple(got), expected) and not fault.item()
    for rows, columns in ((1, k), (n, k), (128, 128)):
        expected = operators.quantize_blocks(weight, rows, columns)[:2]
        *got, fault = in_place(weight.to(device), expected, F8, rows, columns, True, False)
        assert same(tuple(got), expected) and not fault.item(), (rows, columns)


def test_rows_apart(device: str) -> None:
    """Rows that do not lie one after the other, at addresses of no alignment, and columns that do."""
    whole = random_weight(64, 300, torch.bfloat16)
    for part in (whole[:, 3:131], whole[::2, 8:264], whole.t()):
        weight = part.to(device) if part is not whole.t() else whole.to(device).t()
        n, k = weight.shape
        expected = int4(part.contiguous(), 32, False, False, torch.bfloat16)
        assert same(in_place(weight, expected, torch.uint8, 1, 32, False, False)[:2], expected)
        expected = operators.quantize_blocks(part.contiguous(), 1, k)[:2]
        assert same(in_place(weight, expected, F8, 1, k, True, False)[:2], expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_faults(value: float, device: str) -> None:
    """NaN and infinities always, 3e38 where no scale of the dtype holds it."""
    weight = random_weight(40, 256)
    weight[23, 200] = value
    fails = value != 3e38
    plain = weight.nan_to_num(0)
    for group in (64, 256):
        for symmetric, scale_dtype in itertools.product((True, False), (torch.float32, torch.float16)):
            like = int4(plain, group, symmetric, False, scale_dtype)
            fault = in_place(weight.to(device), like, torch.uint8, 1, group, symmetric, False)[2]
            assert fault.item() or not (fails or scale_dtype == torch.float16)
    for rows, columns in ((1, 256), (40, 256), (128, 128)):
        like = operators.quantize_blocks(plain, rows, columns)[:2]
        assert in_place(weight.to(device), like, F8, rows, columns, True, False)[2].item() or not fails
    assert in_place(weight.to(device), (plain.to(torch.int8), plain[:, 0]), torch.int8, 1, 256, True, False)[
        2
    ].item() or (not fails)


def test_opcheck(device: str) -> None:
    weight = random_weight(20, 96).to(device)
    q, scales = (one.to(device) for one in int4(weight.cpu(), 32, False, False, torch.bfloat16))
    fault = torch.zeros(1, dtype=torch.int32, device=device)
    arguments = (weight, torch.uint8, 1, 32, False, False, q, scales, fault)
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPS.quantize_weight_.default, arguments, test_utils=utilities)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dtype": torch.int16}, "dtype must be uint8"),
        ({"columns": 48}, "group_size must be 32"),
        ({"rows": 2}, "rows must be 1"),
        ({"symmetric": True}, "zero points unless symmetric"),
        ({"q": torch.zeros(2, 2, 512, dtype=torch.uint8)}, "packed int4 in an int8 tensor"),
        ({"fault": torch.zeros(1)}, "fault must be int32"),
        ({"weight": torch.zeros(0, 96)}, "weight must have shape"),
        ({"dtype": torch.int8}, "a scale a row"),
        ({"dtype": F8, "columns": 96}, "symmetric"),
        ({"dtype": F8, "columns": 96, "symmetric": True}, r"scales must have shape"),
    ],
)
def test_errors(changes: dict[str, Any], words: str) -> None:
    q, scales = int4(random_weight(20, 96), 32, False, False, torch.bfloat16)
    fault = torch.zeros(1, dtype=torch.int32)
    given = {
        **dict(weight=random_weight(20, 96), dtype=torch.uint8, rows=1, columns=32, symmetric=False),
        **dict(whole_zeros=False, q=q, scales=scales, fault=fault),
        **changes,
    }
    with pytest.raises(RuntimeError, match=f"quantize_weight_: .*{words}"):
        operators.quantize_weight_(**given)
