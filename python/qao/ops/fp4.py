"""Packing, unpacking and dequantization of fp4 weights (MXFP4, NVFP4), in torch on any device.

A weight [N, K] consists of e2m1 codes in uint8 (0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign) and bfloat16
scales [N, G] of groups along K:

    group_size 32   MXFP4   scales are powers of two                       W = code * scale
    group_size 16   NVFP4   scales are e4m3, divisor is float32 [N]        W = code * (scale / divisor)

cuda/layout/fp4.h has the packed layout: codes in the positions of int4's nibbles, scales [ceil(N / 16), G, 1, 16] as
for int4. Groups of 16 add three rows to the scales, bfloat16 numbers that sum to the divisor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import weight_ops
from .packed_shape import TILE_N
from .serial import serial_parts

MX_GROUP, NV_GROUP = 32, 16
GROUPS = {"mxfp4": MX_GROUP, "nvfp4": NV_GROUP}
ROW_PARTS = 3


def pack_fp4(q: Tensor, scales: Tensor, divisor: Tensor | None, group_size: int) -> tuple[Tensor, Tensor]:
    """Packs codes and scales, on any device. Returns the packed weight and its scales.

    Args:
        q: uint8 [N, K] of 0..15.
        scales: [N, ceil(K / group_size)] in a float dtype: powers of two from 2^-127 to 2^127 with groups of 32,
            nonnegative e4m3 values with groups of 16; 0 in both.
        divisor: with groups of 16, float32 [N] or [1], positive: the checkpoint's global scale, a divisor; None: 1.
        group_size: 32 (MXFP4) or 16 (NVFP4).

    Raises:
        ValueError: an argument is not as above. Values are not checked on meta.
    """
    if group_size not in (MX_GROUP, NV_GROUP):
        raise ValueError(f"pack_fp4: group_size must be 32 (MXFP4) or 16 (NVFP4), not {group_size}")
    if q.dtype != torch.uint8 or q.dim() != 2 or 0 in q.shape:
        raise ValueError(f"pack_fp4: q must be uint8 [N, K] of e2m1 codes 0..15, not {q.dtype}{list(q.shape)}")
    n, k = q.shape
    groups = -(-k // group_size)
    if scales.shape != (n, groups) or not scales.is_floating_point() or scales.device != q.device:
        raise ValueError(
            f"pack_fp4: scales must be [{n}, {groups}] in a float dtype on {q.device} for q [{n}, {k}] in groups of "
            f"{group_size}, not {scales.dtype}{list(scales.shape)} on {scales.device}"
        )
    stored = scales.detach().to(torch.bfloat16)
    if not scales.is_meta and not _are_exact(scales.detach(), stored, group_size):
        what = "powers of two from 2^-127 to 2^127" if group_size == MX_GROUP else "e4m3 values of 0 or more"
        raise ValueError(f"pack_fp4: scales of groups of {group_size} must be {what}; use pack_int4 for other scales")
    rows = [stored]
    if group_size == NV_GROUP:
        rows.append(_parts(_divisor(divisor, n, q)))
    elif divisor is not None:
        raise ValueError("pack_fp4: groups of 32 (MXFP4) have no divisor; pass None")
    unused = torch.zeros(n, 1, dtype=torch.bfloat16, device=q.device)
    weight, _ = weight_ops.pack_int4(q.contiguous(), unused, None, -1)
    padded = torch.nn.functional.pad(torch.cat(rows, 1), (0, 0, 0, -n % TILE_N))
    if group_size == NV_GROUP and n % TILE_N:  # padding rows have divisor 1
        padded[n:, groups] = 1
    return weight, padded.view(-1, TILE_N, padded.shape[1]).transpose(1, 2).unsqueeze(2).contiguous()


def unpack_fp4(
    weight: Tensor, scales: Tensor, out_features: int, in_features: int, group_size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inverse of ``pack_fp4``: q uint8 [N, K], scales bfloat16 [N, G], divisor float32 [N] with groups of 16."""
    groups = -(-in_features // group_size)
    extra = ROW_PARTS if group_size == NV_GROUP else 0
    expected = (-(-out_features // TILE_N), groups + extra, 1, TILE_N)
    if group_size not in (MX_GROUP, NV_GROUP) or tuple(scales.shape) != expected:
        raise ValueError(
            f"unpack_fp4: scales must be {list(expected)} for a weight [{out_features}, {in_features}] in groups of "
            f"{group_size} (32 or 16), not {list(scales.shape)}"
        )
    unused = torch.zeros(expected[0], 1, 1, TILE_N, dtype=torch.bfloat16, device=weight.device)
    q, *_ = weight_ops.unpack_int4(weight, unused, out_features, in_features, -1)
    plain = scales.squeeze(2).transpose(1, 2).reshape(-1, groups + extra)[:out_features]
    divisor = None
    if extra:
        first, second, third = plain[:, groups:].float().unbind(1)
        divisor = first + second + third
    return q, plain[:, :groups].contiguous(), divisor


def dequantize_fp4(
    weight: Tensor, scales: Tensor, out_features: int, in_features: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    """W [N, K] in a float dtype, code * (scale / divisor) computed in float32 and rounded once."""
    q, plain, divisor = unpack_fp4(weight, scales, out_features, in_features, group_size)
    of_groups = plain.float() if divisor is None else plain.float() / divisor[:, None]
    return (values_of(q) * of_groups.repeat_interleave(group_size, 1)[:, :in_features]).to(dtype)


def values_of(q: Tensor) -> Tensor:
    """float32 values of e2m1 codes in uint8.

    The lower three bits become the low two exponent bits and the top mantissa bit of a float16, which has a bias
    larger by 14.
    """
    wide = q.to(torch.int16)
    half = (((wide & 7) << 9) | ((wide & 8) << 12)).view(torch.float16)
    return half.float() * 2.0**14


def codes_of(values: Tensor) -> Tensor:
    """uint8: e2m1 codes of float32 ``values``, rounded to nearest even and saturated at 6. NaN becomes 0."""
    magnitude = values.abs().clamp_(max=6).nan_to_num_(0)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = (magnitude / step).round_().mul_(step)
    codes = torch.where(rounded < 2, 2 * rounded, torch.where(rounded < 4, rounded + 2, rounded / 2 + 4))
    return codes.to(torch.uint8) | (values.signbit().to(torch.uint8) << 3)


# On bit patterns: ldexp of torch 2.11 gives wrong numbers on a GPU that is not the current device.
def exponents_of(values: Tensor) -> Tensor:
    """int32: e with 2^e <= values < 2^(e + 1), for nonnegative float32. -127 below 2^-126, including 0."""
    return (values.view(torch.int32) >> 23) - 127


def power_of_two(exponents: Tensor) -> Tensor:
    """float32: 2^exponents for int32 from -127 to 127."""
    return torch.where(exponents < -126, 1 << 22, (exponents + 127) << 23).view(torch.float32)


def _are_powers_of_two(values: Tensor) -> Tensor:
    bits = values.view(torch.int32)
    fraction = bits & 0x7FFFFF
    normal = (bits >> 23 > 0) & (bits >> 23 < 255)  # a subnormal power of two has one bit set in the fraction
    return torch.where(normal, fraction == 0, (bits > 0) & (bits >> 23 == 0) & (fraction & (fraction - 1) == 0))


def _are_exact(given: Tensor, stored: Tensor, group_size: int) -> bool:
    return all(_is_exact(*parts, group_size) for parts in zip(serial_parts(given), serial_parts(stored), strict=True))


def _is_exact(given: Tensor, stored: Tensor, group_size: int) -> bool:
    same = stored == given  # compared in the wider dtype
    if group_size == MX_GROUP:
        return bool((same & (_are_powers_of_two(stored.float()) | (stored == 0))).all())
    return bool((same & (stored.to(torch.float8_e4m3fn).to(stored.dtype) == stored) & ~stored.signbit()).all())


def _divisor(divisor: Tensor | None, n: int, q: Tensor) -> Tensor:
    if divisor is None:
        return torch.ones(n, dtype=torch.float32, device=q.device)
    if divisor.dtype != torch.float32 or divisor.shape not in ((1,), (n,)) or divisor.device != q.device:
        raise ValueError(
            f"pack_fp4: divisor must be float32 [{n}] or [1] on {q.device}, not {divisor.dtype}{list(divisor.shape)} "
            f"on {divisor.device}"
        )
    if not divisor.is_meta and not ((divisor >= 2.0**-100) & (divisor <= 2.0**100)).all():
        raise ValueError("pack_fp4: divisor must be from 2^-100 to 2^100: outside, bfloat16 parts lose digits")
    return divisor.detach().expand(n)


def _parts(divisor: Tensor) -> Tensor:
    """bfloat16 [N, 3], the largest first. Their sum in float32 is exactly ``divisor``."""
    parts = []
    for _ in range(ROW_PARTS):
        parts.append(divisor.to(torch.bfloat16))
        divisor = divisor - parts[-1].float()
    return torch.stack(parts, 1)
