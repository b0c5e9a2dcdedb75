"""Weight quantization to MXFP4 and NVFP4. Each group gets the better of two scales."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..ops import weight_ops
from ..ops.fp4 import GROUPS, NV_GROUP, codes_of, exponents_of, power_of_two, values_of
from .integer import QuantizedWeight, check_values, chunks, quotient, relative_error

LARGEST_FP4, LARGEST_FP8 = 6.0, 448.0  # of e2m1 and e4m3
_EXPONENTS = -127, 127  # of e8m0
_OF_ZEROS = -3  # exponent of an all-zero group, arbitrary
_LANES = 16  # SIMD lanes of a sum in the CPU kernels


def quantize_fp4(weight: Tensor, format: str, *, name: str = "weight") -> QuantizedWeight:
    """Quantizes a float weight [N, K] to e2m1 codes on the weight's device, with the same bits on every device.

    "mxfp4": groups of 32 with a power-of-two scale. Candidates are the scale that maps the group's largest magnitude to
    [4, 8) (the largest code is 6) and twice that scale. "nvfp4": groups of 16 with an e4m3 scale that maps the largest
    magnitude to 6 or to 4; ``zeros`` is the divisor of all scales, float32 [N, 1], which maps the largest one to 448.
    The candidate with the smaller squared error is kept. Scales are bfloat16, which represents both exactly.

    Raises:
        ValueError: the weight holds NaN, Inf or values beyond float32; the message begins with ``name``.
    """
    size = GROUPS[format]
    values = weight.detach()
    if values.device.type == "cpu":
        values = values.float() if values.dtype == torch.float64 else values
        q, scales, divisor, squares = weight_ops.quantize_fp4(values, size)
    else:
        q, scales, divisor, squares = _by_torch(values, size)
    check_values(squares, weight, name)
    zeros = divisor.expand(weight.shape[0], 1).contiguous() if size == NV_GROUP else None
    return QuantizedWeight(q, scales, zeros, relative_error(squares))


def _by_torch(weight: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result of ``weight_ops.quantize_fp4``, except for the last bits of ``squares``."""
    n, k = weight.shape
    q = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, -(-k // size), dtype=torch.bfloat16, device=weight.device)
    squares = torch.zeros(2, dtype=torch.float64, device=weight.device)
    divisor = _divisor(weight) if size == NV_GROUP else torch.ones(1, dtype=torch.float32, device=weight.device)
    for rows, values in chunks(weight):
        squares[1] += values.square().sum(dtype=torch.float64)
        groups = functional.pad(values, (0, -k % size)).view(len(values), -1, size)
        best, codes, error = _choose(groups, _candidates(groups, divisor), divisor)
        scales[rows] = best.squeeze(-1).to(scales.dtype)
        q[rows] = codes.view(len(values), -1)[:, :k]
        squares[0] += error.sum(dtype=torch.float64)
    return q, scales, divisor, squares


def _divisor(weight: Tensor) -> Tensor:
    """float32 [1]: the NVFP4 divisor from the largest magnitude of W; 1 if it would not be finite and positive."""
    largest = torch.stack([values.abs().amax() for _, values in chunks(weight)]).amax().reshape(1)
    divisor = largest.reciprocal() * (LARGEST_FP4 * LARGEST_FP8)
    return torch.where(divisor.isfinite() & (divisor > 0), divisor, 1.0).clamp_(2.0**-100, 2.0**100)


def _candidates(groups: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """Two candidate scales per group, [rows, groups, 1]."""
    largest = groups.abs().amax(-1, keepdim=True)
    if groups.shape[-1] != NV_GROUP:
        # largest / 2^exponent is in [4, 8)
        exponent = torch.where(largest == 0, _OF_ZEROS, (exponents_of(largest) - 2).clamp_(*_EXPONENTS))
        return power_of_two(exponent), power_of_two((exponent + 1).clamp_(max=_EXPONENTS[1]))
    wanted = largest * divisor
    first, second = (
        quotient(wanted, code).nan_to_num_(0).clamp_(max=LARGEST_FP8).to(torch.float8_e4m3fn).float()
        for code in (LARGEST_FP4, 4.0)
    )
    return first, second


def _choose(groups: Tensor, candidates: tuple[Tensor, Tensor], divisor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The better scale of each group [rows, groups, 1], its codes [rows, groups, size] and squared errors."""
    errors, codes = [], []
    for scale in candidates:
        step = scale / divisor
        codes.append(codes_of(torch.where(step > 0, groups / step, 0)))
        errors.append(_sums((values_of(codes[-1]) * step - groups).square_()))
    second = errors[1] < errors[0]
    best = torch.where(second, candidates[1], candidates[0])
    return best, torch.where(second, codes[1], codes[0]), torch.where(second, errors[1], errors[0])


def _sums(values: Tensor) -> Tensor:
    """Sums along the last dimension, over sixteen lanes and then pairwise, so that the order is device-independent."""
    lanes = values.split(_LANES, -1)
    sums: Tensor = lanes[0] if len(lanes) == 1 else lanes[0] + lanes[1]
    while sums.shape[-1] > 1:
        low, high = sums.chunk(2, -1)
        sums = low + high
    return sums
