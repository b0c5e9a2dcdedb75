"""Schemes of the shared tests: formats, random weights, and quantization of x.

``PRODUCTS`` parametrizes the generic tests; ``SCHEMES`` are those with integer or e4m3 weights. A scheme's formats
define weight storage and activation quantization; ``make_weight`` gives the operator's arguments and, in float64, their
exact value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import qao.ops
import torch
from qao.ops import reference
from qao.ops.fp4 import codes_of
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", None: "none"}
BLOCK = reference.BLOCK


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- activations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Activation:
    """The transformation of x [M, K] before the GEMM."""

    format: str = "float"  # "float" (not quantized), "int8" or "fp8"
    symmetric: bool = True  # int8
    group_size: int = -1  # fp8: columns that share a scale; -1 a row, 0 all of x
    static_scale: float | None = None  # fp8, group_size 0
    beside_int4: bool = False  # fp8: so is the weight

    def __str__(self) -> str:
        if self.format == "int8":
            return "sym" if self.symmetric else "asym"
        if self.static_scale is not None:
            return "static"
        return {-1: "row", 0: "tensor", BLOCK: "block"}[self.group_size]

    @property
    def keeps_rows_apart(self) -> bool:
        return self.format != "fp8" or self.group_size != 0

    def scale(self, device: torch.device) -> Tensor | None:
        return None if self.static_scale is None else torch.tensor([self.static_scale], device=device)

    def quantize(self, x: Tensor) -> tuple[Tensor, ...]:
        """By the operators."""
        if self.format == "int8":
            return torch.ops.qao.int8_quantize(x, self.symmetric)
        return torch.ops.qao.fp8_quantize(x, self.scale(x.device), self.group_size)

    def quantize_by_definition(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.format == "int8":
            return reference.quantize_activation_int8(x, symmetric=self.symmetric)
        return reference.quantize_activation_fp8(x, self.group_size, self.scale(x.device))

    def seen(self, x: Tensor) -> Tensor:
        """x̂ [M, K] float64: the GEMM's activations, from the separately tested quantization operators."""
        return x.double() if self.format == "float" else reference.dequantize_activation(*self.quantize(x))

    def step(self, x: Tensor) -> Tensor:
        """[M, K]: how far x̂ may be from x. Half a step of int8, a whole one at the ends of a rounded zero point; e4m3
        rounds to 3 bits, and to multiples of 2^-9 below 2^-6."""
        if self.format == "float":
            return torch.zeros_like(x, dtype=torch.float64)
        scales = reference.dequantize_activation(torch.ones_like(x), self.quantize_by_definition(x)[1])
        step = scales * (0.5 if self.symmetric else 1) if self.format == "int8" else None
        if step is None:
            step = torch.maximum(x.double().abs() * 2.0**-4, scales * 2.0**-10)
        return step * (1 + 2.0**-20)  # the scale and its reciprocal are rounded to float32

    def slack(self, x: Tensor, dense: Tensor) -> Tensor:
        """[M, N]: extra rounding error of a GEMM, compared with plain torch on x̂, because of how x is stored."""
        if self.format == "int8" and not self.symmetric:
            # Sums of q, which is not centered (a kernel may shift by 128 to have it unsigned), and of the zero
            # points, which then cancel: each is rounded to float32. Nibbles enter unsigned, about twice |W|.
            q, scales, zeros = self.quantize(x)
            sums = (q.double().abs() + 128) @ dense.abs().T + zeros.abs() * dense.sum(1).abs()
            return scales.double() * sums * 2.0**-21
        if self.format == "fp8" and x.is_cuda:
            # The tensor cores align an instruction's 32 e4m3 products and the running sum to the largest of them and
            # keep 13 bits below it. Four instructions of up to 33 addends, each off by half a last bit on average,
            # would be 2^-7 of the largest term if all errors had one sign.
            seen = self.seen(x)
            if self.beside_int4:
                # Codes below 8 are e4m3 subnormals, which are aligned as if they were 8: about the row's largest.
                return 2.0**-8 * seen.norm(dim=1)[:, None] * dense.abs().amax(1)
            return 2.0**-8 * (seen**2 @ (dense**2).T).sqrt()
        return torch.zeros(x.shape[0], dense.shape[0], dtype=torch.float64, device=x.device)


FLOAT = Activation()
INT8, INT8_ASYMMETRIC = Activation("int8"), Activation("int8", symmetric=False)
FP8, FP8_TENSOR, FP8_BLOCK = Activation("fp8"), Activation("fp8", group_size=0), Activation("fp8", group_size=BLOCK)
FP8_BESIDE_INT4 = Activation("fp8", beside_int4=True)
FP8_STATIC = Activation("fp8", group_size=0, static_scale=0.02)  # 448 steps reach 8.96: no randn saturates


# ---- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """A quantized weight: what the op takes, and the numbers it stands for."""

    operands: tuple[Tensor, Tensor]  # weight, scales
    arguments: tuple[Any, ...]  # the op's arguments after bias
    dense: Tensor  # [N, K] float64, exactly what the operands mean
    activation: Activation

    def slack(self, x: Tensor) -> Tensor:
        """[M, N]: extra rounding error of a GEMM, compared with plain torch on x̂, because of how both are stored."""
        slack = self.activation.slack(x, self.dense)
        if self.operands[0].dim() == 3:
            # Four bits: zero points may come off as their product with the sum of x. Where x has a mean, that product,
            # and the sum it is taken from, are larger than the result by far. Both are rounded to float32.
            sums = self.activation.seen(x).sum(1, keepdim=True).abs()
            slack = slack + 2.0**-23 * sums * self.dense.abs().amax(1)
        return slack

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.operands, *(a for a in self.arguments if isinstance(a, Tensor)))

    @property
    def n(self) -> int:
        return self.dense.shape[0]

    @property
    def k(self) -> int:
        return self.dense.shape[1]


@dataclass(frozen=True)
class Parts:
    """A weight in plain tensors."""

    q: Tensor  # [N, K]: int4 or e2m1 in uint8, int8, or float8_e4m3fn
    scales: Tensor
    zeros: Tensor | None = None  # int4; fp4: the divisor [N]
    group_size: int | None = None  # int4, fp4
    is_float: bool = False  # fp4
    row_scales: Tensor | None = None  # [N]: int4's scales are multiples of them

    def with_rows_times(self, factors: Tensor) -> Parts:
        """The same weight with row n multiplied by factors[n], powers of two."""
        if self.is_float and self.zeros is not None:
            return replace(self, zeros=self.zeros / factors)
        return replace(
            self,
            scales=self.scales * factors.view(-1, *[1] * (self.scales.dim() - 1)).to(self.scales.dtype),
            row_scales=None if self.row_scales is None else self.row_scales * factors,
        )

    def dense(self) -> Tensor:
        """[N, K] float64."""
        if self.group_size is None:
            return reference.dequantize_8bit(self.q, self.scales)
        if self.is_float:
            return reference.dequantize_fp4(self.q, self.scales, self.zeros, self.group_size)
        return reference.dequantize(self.q, self.scales, self.zeros, self.group_size)

    def operands(self) -> tuple[Tensor, Tensor]:
        if self.group_size is None:
            return self.q.view(torch.int8), self.scales  # as layers store e4m3 too
        if self.is_float:
            return qao.ops.pack_fp4(self.q, self.scales, self.zeros, self.group_size)
        return torch.ops.qao.pack_int4(self.q, self.scales, self.zeros, self.group_size)

    @property
    def has_row_scales(self) -> bool:
        return self.scales.shape[0] == self.q.shape[0]

    def of_integers(self, values: Tensor) -> Parts:
        """The same format with scales of one and no zero points, for values [N, K] in -7..7, of
        which fp4 rounds 5 and 7."""
        if self.is_float:
            zeros = None if self.zeros is None else torch.ones_like(self.zeros)
            return replace(self, q=codes_of(values.float()), scales=torch.ones_like(self.scales), zeros=zeros)
        q = values if self.group_size is None else values + 8
        row_scales = None if self.row_scales is None else torch.ones_like(self.row_scales)
        return replace(
            self, q=q.to(self.q.dtype), scales=torch.ones_like(self.scales), zeros=None, row_scales=row_scales
        )


@dataclass(frozen=True)
class Int4Format:
    """How an int4 weight is quantized; ``zeros`` is "none" (symmetric), "integer" or "float"; or "rows" and
    "powers": symmetric, with scales that are integers or powers of two times one scale of their row."""

    group_size: int = 128
    zeros: str = "none"
    scale_dtype: torch.dtype = torch.float32
    activation: Activation = FLOAT

    def __str__(self) -> str:
        activation = "" if self.activation == FLOAT else f"-a_{self.activation}"
        return f"g{self.group_size}-{self.zeros}-s_{SHORT[self.scale_dtype]}{activation}"

    def parts(self, n: int, k: int, seed: int) -> Parts:
        g = generator(seed)
        groups = 1 if self.group_size == -1 else -(-k // self.group_size)
        q = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
        scales = (torch.rand(n, groups, generator=g) * 0.02 + 0.01).to(self.scale_dtype)
        zeros = None
        if self.zeros == "rows":
            rows = torch.randint(8, 16, (n,), generator=g) * 2.0**-13
            whole = torch.randint(-15, 16, (n, groups), generator=g)
            whole += whole >= 0  # any but 0
            return Parts(q, (whole * rows[:, None]).to(self.scale_dtype), None, self.group_size, False, rows)
        if self.zeros == "powers":
            rows = torch.randint(8, 16, (n,), generator=g) * 2.0**-9
            powers = 2.0 ** torch.randint(-4, 3, (n, groups), generator=g)
            powers *= 1 - 2 * torch.randint(0, 2, (n, groups), generator=g)
            return Parts(q, (powers * rows[:, None]).to(self.scale_dtype), None, self.group_size, False, rows)
        if self.zeros == "integer":
            zeros = torch.randint(0, 16, (n, groups), generator=g).to(self.scale_dtype)
        elif self.zeros == "float":
            zeros = (torch.rand(n, groups, generator=g) * 15).to(self.scale_dtype)
        return Parts(q, scales, zeros, self.group_size)


@dataclass(frozen=True)
class ByteFormat:
    """How an 8-bit weight is quantized: ``dtype`` int8 or float8_e4m3fn, a scale per "row", "tensor" or "block"."""

    dtype: torch.dtype
    granularity: str = "row"
    activation: Activation = FLOAT

    def __str__(self) -> str:
        return f"{self.granularity}-a_{self.activation}" if self.activation != FLOAT else self.granularity

    def parts(self, n: int, k: int, seed: int) -> Parts:
        g = generator(seed)
        q = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
        if self.dtype != torch.int8:
            q = q.where(q & 127 != 127, 0).view(self.dtype)  # every number of e4m3; 0x7F and 0xFF are NaN
        blocks = -(-n // BLOCK), -(-k // BLOCK)
        rows = (n,) if self.dtype == torch.int8 else (n, 1)
        shape = {"row": rows, "tensor": (1,), "block": blocks}[self.granularity]
        return Parts(q, torch.rand(shape, generator=g) * 0.002 + 0.001)


@dataclass(frozen=True)
class Fp4Format:
    """Four-bit floats in groups of 32 (MXFP4) or 16 (NVFP4), with a divisor for all of W or for each row."""

    group_size: int = 32
    divisor: str = "none"
    activation: Activation = FLOAT

    def __str__(self) -> str:
        return f"g{self.group_size}-{self.divisor}"

    def parts(self, n: int, k: int, seed: int) -> Parts:
        g = generator(seed)
        groups = -(-k // self.group_size)
        q = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
        if self.group_size == 32:
            return Parts(q, 2.0 ** torch.randint(-8, -4, (n, groups), generator=g), None, 32, True)
        scales = (torch.rand(n, groups, generator=g) * 440 + 1).to(torch.float8_e4m3fn).float()
        divisor = torch.rand(n if self.divisor == "row" else 1, generator=g) * 20000 + 10000
        return Parts(q, scales, divisor.expand(n).contiguous(), 16, True)


Format = Int4Format | ByteFormat | Fp4Format


# ---- schemes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scheme:
    """``torch.ops.qao.<word>_mm`` as the generic tests use it."""

    word: str
    formats: tuple[Any, ...]
    few_formats: tuple[Any, Any]  # between them they use every part of the op, for tests about something else

    @property
    def op(self) -> Callable[..., Tensor]:
        return getattr(torch.ops.qao, f"{self.word}_mm").default

    @property
    def differentiable(self) -> Callable[..., Tensor]:
        return getattr(qao.ops, f"{self.word}_mm")

    def parts(self, n: int, k: int, fmt: Format | None = None, device: str = "cpu", seed: int = 0) -> Parts:
        parts = (fmt or self.few_formats[0]).parts(n, k, seed)
        q, scales, zeros, row_scales = (
            t if t is None else t.to(device) for t in (parts.q, parts.scales, parts.zeros, parts.row_scales)
        )
        return Parts(q, scales, zeros, parts.group_size, parts.is_float, row_scales)  # type: ignore[arg-type]

    def pack(self, parts: Parts, activation: Activation = FLOAT) -> Weight:
        dense = parts.dense()
        arguments: tuple[Any, ...] = ()
        if activation.format == "int8":
            arguments = (None if activation.symmetric else dense.sum(1).float(),)
        elif self.word == "fp8_fp8":
            arguments = (activation.scale(dense.device), activation.group_size, False)
        row_scales = (parts.row_scales,) if self.word in ("int8_int4", "fp8_int4") else ()
        sizes = () if parts.group_size is None else (*parts.q.shape, parts.group_size)
        return Weight(parts.operands(), (*arguments, *row_scales, *sizes), dense, activation)

    def make_weight(self, n: int, k: int, fmt: Format | None = None, device: str = "cpu", seed: int = 0) -> Weight:
        fmt = fmt or self.few_formats[0]
        return self.pack(self.parts(n, k, fmt, device, seed), fmt.activation)

    def mm(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return self.op(x, *weight.operands, bias, *weight.arguments)

    def mm_with_grad(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return self.differentiable(x, *weight.operands, bias, *weight.arguments)


def _int4_formats(zeros: tuple[str, ...], scale_dtypes: tuple[torch.dtype, ...], *activations: Activation) -> Any:
    return tuple(
        Int4Format(group_size, zero, scale_dtype, activation)
        for group_size in (32, 64, 128, 256, -1)
        for zero in zeros
        for scale_dtype in scale_dtypes
        for activation in activations
    )


def _int4_scheme(word: str, formats: Any, activation: Activation, other: Activation) -> Scheme:
    few = Int4Format(activation=activation), Int4Format(32, "float", torch.bfloat16, other)
    return Scheme(word, formats, few)


def _byte_scheme(word: str, *formats: ByteFormat) -> Scheme:
    return Scheme(word, formats, (formats[0], formats[-1]))


_F8 = torch.float8_e4m3fn
INT4 = _int4_scheme("int4", _int4_formats(("none", "integer", "float"), DTYPES, FLOAT), FLOAT, FLOAT)
INT8_INT4 = _int4_scheme(
    "int8_int4", _int4_formats(("none", "rows", "float"), DTYPES, INT8, INT8_ASYMMETRIC), INT8, INT8_ASYMMETRIC
)
FP8_INT4 = _int4_scheme(
    "fp8_int4", _int4_formats(("none", "powers", "float"), DTYPES, FP8_BESIDE_INT4), FP8_BESIDE_INT4, FP8_BESIDE_INT4
)
INT4_SCHEMES = (INT4, INT8_INT4, FP8_INT4)
SCHEMES = (
    *INT4_SCHEMES,
    _byte_scheme("int8", ByteFormat(torch.int8), ByteFormat(torch.int8, "tensor")),
    _byte_scheme("fp8", ByteFormat(_F8), ByteFormat(_F8, "tensor"), ByteFormat(_F8, "block")),
    _byte_scheme(
        "int8_int8",
        ByteFormat(torch.int8, "row", INT8),
        ByteFormat(torch.int8, "tensor", INT8),
        ByteFormat(torch.int8, "row", INT8_ASYMMETRIC),
    ),
    _byte_scheme(
        "fp8_fp8",
        ByteFormat(_F8, "row", FP8),
        ByteFormat(_F8, "row", FP8_TENSOR),
        ByteFormat(_F8, "tensor", FP8_TENSOR),
        ByteFormat(_F8, "row", FP8_STATIC),
        ByteFormat(_F8, "block", FP8_BLOCK),
    ),
)
FP4 = Scheme("fp4", (Fp4Format(), Fp4Format(16, "tensor"), Fp4Format(16, "row")), (Fp4Format(), Fp4Format(16, "row")))
PRODUCTS = (*SCHEMES, FP4)
