"""The float64 reference, and the tolerance of a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

# Number of rows used to measure plain torch's error: enough that a lucky rounding does not set the tolerance.
PLAIN_ROWS = 128


def truth(x: Tensor, dense: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · denseᵀ + bias in float64."""
    y = x.double() @ dense.T
    return y if bias is None else y + bias.double()


def row_scale(x: Tensor, dense: Tensor, bias: Tensor | None = None) -> Tensor:
    """[M, 1]: the magnitude of each token's sums, free of cancellation.

    It is the largest root, over the elements of that row of y, of the sum of the squared terms.
    """
    return _scale(truth(x.double() ** 2, dense**2), bias)


def _scale(squares: Tensor, bias: Tensor | None) -> Tensor:
    """``row_scale`` from the sums [M, N] of the squared terms without that of the bias."""
    whole = squares if bias is None else squares + bias.double() ** 2
    return whole.amax(1, keepdim=True).sqrt()


def _relative(error: Tensor, scale: Tensor) -> Tensor:
    """error [M, N] / scale [M, 1]; 0 in rows without scale, which `Tolerance.elements` checks."""
    return (error / scale).masked_fill(scale == 0, 0)


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


@dataclass(frozen=True)
class Tolerance:
    elements: Tensor  # [M, N] largest permitted |y - truth|
    rms: float  # largest permitted root mean square of (y - truth) / row_scale
    truth: Tensor  # [M, N] float64


def tolerance(
    x: Tensor, dense: Tensor, bias: Tensor | None = None, seen: Tensor | None = None, slack: Tensor | None = None
) -> Tolerance:
    """How far y may be from the truth for x [M, K], dense [N, K], bias [N].

    Where x is quantized first, ``seen`` [M, K] float64 is what it became: it takes the place of x, rounded to x's dtype
    for plain torch. ``slack`` [M, N] is added, as an error that any element may have in addition.

    An element may be wrong by the sum of
      - twice the largest error, relative to `row_scale`, of plain torch: F.linear in x's dtype on the dense weight
        rounded to that dtype. It is measured on PLAIN_ROWS rows made of x's with random signs, so that it is an error
        of this computation and not the luck of a few roundings;
      - one rounding of the result to x's dtype, and the smallest subnormal where the result is that small;
      - float32 accumulation in one chain: K roundings of 2^-24 of partial sums that grow like sqrt(k), together
        2^-24 sqrt(K) of `row_scale`. It matters for float32 x only, where plain torch sums in blocks.
    The root mean square over all elements, which sees what a maximum hides, may be twice that of plain torch plus the
    same two terms (rounding errors are spread evenly, hence 1 / sqrt(3) of their maximum); `2 / sqrt(count)` allows for
    the spread of a mean over few elements.
    """
    return tolerances(x, dense, (bias,), seen, slack)[0]


def tolerances(
    x: Tensor, dense: Tensor, biases: Sequence[Tensor | None], seen: Tensor | None = None, slack: Tensor | None = None
) -> list[Tolerance]:
    """`tolerance` with each of the biases, of which None is one without a bias."""
    m, k = x.shape
    seen = x if seen is None else seen
    sample = seen[torch.arange(PLAIN_ROWS, device=x.device) % m].to(x.dtype) * _signs(k, x.dtype, x.device)
    rounded, squared = dense.to(x.dtype), dense**2
    both = torch.cat((sample.double(), seen.double()))
    sums, squares = both @ dense.T, (both**2) @ squared.T  # of the rows of the sample, then of seen

    accumulation = 2.0**-24 * k**0.5
    finfo = torch.finfo(x.dtype)
    found = []
    for bias in biases:
        with_bias = sums if bias is None else sums + bias.double()
        scale, expected = _scale(squares, bias), with_bias[PLAIN_ROWS:]
        plain = F.linear(sample, rounded, None if bias is None else bias.to(x.dtype))
        relative = _relative(plain.double() - with_bias[:PLAIN_ROWS], scale[:PLAIN_ROWS])
        rounding = finfo.eps / 2 * expected.abs() + finfo.smallest_normal * finfo.eps
        if slack is not None:
            rounding = rounding + slack
        scale = scale[PLAIN_ROWS:]
        elements = (2 * relative.abs().max() + accumulation) * scale + rounding
        rms = 2 * _rms(relative) + accumulation + _rms(_relative(rounding, scale)) / 3**0.5
        found.append(Tolerance(elements, rms * (1 + 2 / expected.numel() ** 0.5), expected))
    return found


@lru_cache(maxsize=64)
def _signs(k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, 2, (PLAIN_ROWS, k), generator=g).to(device, dtype) * 2 - 1


def check_metadata(y: Tensor, x: Tensor, n: int) -> None:
    """y is [..., N], contiguous, of x's dtype and device."""
    assert y.shape == (*x.shape[:-1], n)
    assert y.dtype == x.dtype
    assert y.device == x.device
    assert y.is_contiguous()


def check_close(
    y: Tensor,
    x: Tensor,
    dense: Tensor,
    bias: Tensor | None = None,
    seen: Tensor | None = None,
    slack: Tensor | None = None,
) -> None:
    """y is x · denseᵀ + bias within `tolerance`. x [..., K], dense [N, K] float64, bias [N]."""
    check_metadata(y, x, dense.shape[0])
    if y.numel() == 0:
        return
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    seen = x if seen is None else seen
    allowed = tolerance(x, dense, bias, seen, slack)
    expected = allowed.truth
    error = (y.double() - expected).abs()
    wrong = ~(error <= allowed.elements)  # so that NaN is wrong
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        worst = (error / allowed.elements).nan_to_num(nan=float("inf")).max().item()
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, the first at [{row}, {column}]: "
            f"{y[row, column].item()} for {expected[row, column].item()}, allowed error "
            f"{allowed.elements[row, column].item():.3g}; worst error / allowed {worst:.3g}"
        )
    rms = _rms(_relative(error, row_scale(seen, dense, bias)))
    assert rms <= allowed.rms, f"root mean square of the relative error {rms:.3g}, allowed {allowed.rms:.3g}"
