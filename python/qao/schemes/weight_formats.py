"""The four weight formats: int4, fp4, int8 and e4m3."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .. import ops
from ..ops import fp4, weight_ops
from ..ops.packed_shape import SCALE_BLOCK
from ..quant_primitives.fp4 import quantize_fp4
from ..quant_primitives.fp8 import quantize_fp8
from ..quant_primitives.integer import QuantizedWeight, quantize_int4, quantize_int8, row_sums
from .base import FLOAT_DTYPES as FLOAT_DTYPES
from .base import OnePass as OnePass
from .base import PackedWeight as PackedWeight
from .base import Scheme as Scheme
from .base import _host as _host

Granularity = Literal["row", "tensor", "block"]  # of scales
GROUP_SIZES = (32, 64, 128, 256, -1)  # of the int4 kernels, the most accurate first


@dataclass(frozen=True)
class Int4Weight(Scheme):
    """int4, W = (q - zero) * scale in groups along K, packed in the tiles of cuda/layout/int4.h."""

    group_size: int = 128
    symmetric: bool = False
    scale_dtype: torch.dtype | None = None
    clip_search: bool = True
    whole_zeros: bool = field(default=False, kw_only=True)

    weights: ClassVar[str] = "int4"
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOAT_DTYPES

    def __post_init__(self) -> None:
        if type(self.group_size) is not int or self.group_size not in GROUP_SIZES:
            self._reject("group_size", "32, 64, 128, 256, or -1 for one group per row")
        self._check_bool("symmetric", "clip_search", "symmetric_activations", "whole_zeros")
        if self.scale_dtype is not None and self.scale_dtype not in FLOAT_DTYPES:
            expected = "torch.float32, torch.float16, torch.bfloat16, or None for the dtype of the layer's weight"
            self._reject("scale_dtype", expected)

    def to_dict(self) -> dict[str, Any]:
        content = super().to_dict()
        if not self.whole_zeros:  # omitted if off, for readers of older versions
            del content["whole_zeros"]
        return content

    def __str__(self) -> str:
        activations = "" if self.symmetric_activations else ", asymmetric activations"
        zeros = "symmetric" if self.symmetric else "asymmetric, whole zeros" if self.whole_zeros else "asymmetric"
        return f"{self.word} g{self.group_size} {zeros}{activations}"

    def scale_dtype_of(self, given: torch.dtype) -> torch.dtype:
        return self.scale_dtype or super().scale_dtype_of(given)

    def with_scales_of(self, dtype: torch.dtype) -> Scheme:
        return replace(self, scale_dtype=self.scale_dtype_of(dtype))

    def _quantize(self, weight: Tensor, name: str, importance: Tensor | None = None) -> QuantizedWeight:
        dtype = self.scale_dtype_of(weight.dtype)
        options: Any = {"clip_search": self.clip_search, "whole_zeros": self.whole_zeros, "name": name}
        options["importance"] = importance
        return quantize_int4(weight, self.group_size, symmetric=self.symmetric, scale_dtype=dtype, **options)

    def one_pass(self, n: int, k: int) -> OnePass | None:
        return None if self.clip_search else (torch.uint8, 1, self.group_size, self.symmetric, self.whole_zeros)

    def _plain(self, n: int, k: int) -> tuple[tuple[torch.dtype, ...], tuple[int, int], bool]:
        groups = 1 if self.group_size == -1 else -(-k // self.group_size)
        return (torch.uint8,), (n, groups), not self.symmetric

    def _store(self, q: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.ops.qao.pack_int4(q, scales, zeros, self.group_size)  # type: ignore[no-any-return]

    def unpack(self, weight: Tensor, scales: Tensor, n: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        q, plain, zeros = weight_ops.unpack_int4(weight, scales, n, k, self.group_size)
        return q, plain, None if self.symmetric else zeros

    def units(self, n: int, k: int) -> tuple[int, int]:
        return 1, self.group_size if 0 < self.group_size < k else 1

    def _weight_sums(self, q: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        return row_sums(q, scales, 8 if zeros is None else zeros, self.group_size)

    def dequantize(self, weight: Tensor, scales: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
        return weight_ops.dequantize_int4(weight, scales, n, k, self.group_size, dtype)

    def sizes(self, n: int, k: int) -> tuple[int, ...]:
        return n, k, self.group_size

    def _problem(self, **facts: Any) -> _host.Problem:
        return super()._problem(group_size=self.group_size, has_zeros=not self.symmetric, **facts)


@dataclass(frozen=True)
class Fp4Weight(Scheme):
    """e2m1 floats in groups along K, packed in the tiles of cuda/layout/int4.h: W = code * scale, or, with "nvfp4",
    W = code * (scale / divisor). Unpacked, ``zeros`` is the divisor, float32 [N, 1]."""

    format: Literal["mxfp4", "nvfp4"] = "mxfp4"

    weights: ClassVar[str] = "fp4"
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)

    def __post_init__(self) -> None:
        if self.format not in fp4.GROUPS:
            self._reject("format", '"mxfp4" or "nvfp4"')

    @property
    def group_size(self) -> int:
        """Columns of W that share a scale."""
        return fp4.GROUPS[self.format]

    def __str__(self) -> str:
        return f"{self.word} {self.format}"

    def scale_dtype_of(self, given: torch.dtype) -> torch.dtype:
        return torch.bfloat16

    def pack(self, q: Tensor, scales: Tensor, zeros: Tensor | None = None) -> PackedWeight:
        """As ``Scheme.pack``, with e2m1 codes in uint8 and scales [N, ceil(K / group)]: powers of two, or e4m3 values
        with "nvfp4"; ``zeros``: with "nvfp4" their divisor, float32 [N], [N, 1] or [1], otherwise None."""
        try:
            divisor = None if zeros is None else zeros.detach().reshape(-1)
            n, k = q.shape
            return PackedWeight(*fp4.pack_fp4(q, scales, divisor, self.group_size), sizes=(n, k))
        except ValueError as error:
            raise ValueError(f"{self}: {error}") from error

    def _quantize(self, weight: Tensor, name: str, importance: Tensor | None = None) -> QuantizedWeight:
        return quantize_fp4(weight, self.format, name=name)

    def one_pass(self, n: int, k: int) -> OnePass | None:
        return torch.float4_e2m1fn_x2, 1, self.group_size, True, False

    def _plain(self, n: int, k: int) -> tuple[tuple[torch.dtype, ...], tuple[int, int], bool]:
        return (torch.uint8,), (n, -(-k // self.group_size)), False

    def _store(self, q: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor]:
        return fp4.pack_fp4(q, scales, zeros, self.group_size)

    def unpack(self, weight: Tensor, scales: Tensor, n: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        q, plain, divisor = fp4.unpack_fp4(weight, scales, n, k, self.group_size)
        return q, plain, None if divisor is None else divisor[:, None]

    def units(self, n: int, k: int) -> tuple[int, int]:
        return 1, self.group_size if self.group_size < k else 1

    def _weight_sums(self, q: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        raise NotImplementedError("activations of fp4 weights have no zero points")

    def dequantize(self, weight: Tensor, scales: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
        return fp4.dequantize_fp4(weight, scales, n, k, self.group_size, dtype)

    def sizes(self, n: int, k: int) -> tuple[int, ...]:
        return n, k, self.group_size

    def _problem(self, **facts: Any) -> _host.Problem:
        return super()._problem(group_size=self.group_size, **facts)


@dataclass(frozen=True)
class Int8Weight(Scheme):
    """W = q * scale with q in int8 and one scale per row, row-major."""

    clip_search: bool = True

    weights: ClassVar[str] = "int8"
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)

    def __post_init__(self) -> None:
        self._check_bool("clip_search", "symmetric_activations")

    def _quantize(self, weight: Tensor, name: str, importance: Tensor | None = None) -> QuantizedWeight:
        return quantize_int8(weight, clip_search=self.clip_search, importance=importance, name=name)

    def one_pass(self, n: int, k: int) -> OnePass | None:
        return None if self.clip_search else (torch.int8, 1, k, True, False)

    def _plain(self, n: int, k: int) -> tuple[tuple[torch.dtype, ...], tuple[int], bool]:
        return (torch.int8,), (n,), False

    def _store(self, q: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor]:
        return q, scales

    def unpack(self, weight: Tensor, scales: Tensor, n: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        return weight, scales, None

    def _weight_sums(self, q: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        return row_sums(q, scales, 0, -1)

    def dequantize(self, weight: Tensor, scales: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
        return ops.dequantize_int8(weight, scales, dtype)


@dataclass(frozen=True)
class Float8Weight(Scheme):
    """W = q * scale with q in e4m3, row-major. Scales are 2-D, int8's are 1-D, so checkpoints can be identified."""

    granularity: Granularity = "row"

    weights: ClassVar[str] = "fp8"
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)

    def __post_init__(self) -> None:
        if self.granularity not in ("row", "tensor", "block"):
            self._reject("granularity", '"row", "tensor" or "block"')

    def __str__(self) -> str:
        return f"{self.word} {self.granularity}"

    def _quantize(self, weight: Tensor, name: str, importance: Tensor | None = None) -> QuantizedWeight:
        return quantize_fp8(weight, self.granularity, name=name)

    def one_pass(self, n: int, k: int) -> OnePass | None:
        rows, columns = {"row": (1, k), "tensor": (n, k), "block": (SCALE_BLOCK, SCALE_BLOCK)}[self.granularity]
        return torch.float8_e4m3fn, rows, columns, True, False

    def _plain(self, n: int, k: int) -> tuple[tuple[torch.dtype, ...], tuple[int, int], bool]:
        blocks = -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)
        shape = {"row": (n, 1), "tensor": (1, 1), "block": blocks}[self.granularity]
        return (torch.float8_e4m3fn, torch.int8), shape, False

    def _store(self, q: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor]:
        return q.view(torch.int8), scales

    def unpack(self, weight: Tensor, scales: Tensor, n: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        return weight.view(torch.float8_e4m3fn), scales, None

    def units(self, n: int, k: int) -> tuple[int, int]:
        blocks = self.granularity == "block"
        return SCALE_BLOCK if blocks and n > SCALE_BLOCK else 1, SCALE_BLOCK if blocks and k > SCALE_BLOCK else 1

    def _weight_sums(self, q: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        raise NotImplementedError("e4m3 activations have no zero points")

    def dequantize(self, weight: Tensor, scales: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
        return ops.dequantize_fp8(weight, scales, dtype)

    def _problem(self, **facts: Any) -> _host.Problem:
        return super()._problem(weight_scaling=self.granularity, **facts)
