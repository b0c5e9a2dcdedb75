"""Loads the operator library and gives every product a gradient.

``torch.ops.qao.*`` are the raw operators, without autograd. Each has a function of its name and arguments here, which
layers call; products, ``add_rms_norm``, ``silu_mul``, ``swiglu``, ``expert_topk`` and ``expert_sum`` have gradients.
Sizes everywhere: M tokens, N = out_features, K = in_features; x [..., K], weight [N, K], y [..., N].

All products take and return alike:
    x: [..., K], float32, float16 or bfloat16; any strides.
    weight, scales: as their scheme stores them, see below.
    bias: [N] in a float dtype, or None.
    result: [..., N], contiguous, in x's dtype; accumulated in float32, or exactly where both operands are integers.
Those of experts, ``*_grouped_mm``: see grouped.py.
With ``batch_invariant``, or within ``qao.batch_invariant()``, a row of the result depends on its row of x and W alone.
They raise RuntimeError where a shape, dtype, device or alignment does not fit; the message lists all and the remedy.
Gradients go to x and bias. That of x is dy · W: rounding x to eight bits counts as the identity (straight-through).

Weights
    int4: weight and scales as ``pack_int4`` returned them, with the same ``group_size``, N and K. All three may be left
        out where N is a multiple of 16 and K of 64: the tensors tell them.
    int8: weight int8 [N, K], scales float32 [N] or [1].
    fp4: weight and scales as ``pack_fp4`` returned them, with the same ``group_size``, N and K, or left out alike.
    fp8: weight float8_e4m3fn [N, K] or its bytes as int8, scales float32 [N], [N, 1], [1] or one a block of 128 x 128,
        [ceil(N / 128), ceil(K / 128)].
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


def _load() -> None:
    library = Path(__file__).with_name("_C.so")
    if sys.platform != "linux":
        raise ImportError(
            f"qao runs on Linux alone; this is {sys.platform}. On Windows use WSL 2, on macOS a Linux container."
        )
    if not library.exists():
        raise ImportError(
            f"qao's operator library is missing ({library}). In a source checkout, build it with "
            "`pip install --no-build-isolation -e .`; otherwise reinstall qao."
        )
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise ImportError(
            f"qao's operator library does not load with torch {torch.__version__}: {error}. qao needs torch >= 2.11; "
            "upgrade torch or reinstall qao."
        ) from error
    if not ctypes.CDLL(str(library)).qao_is_registered():
        others = {path for path in torch.ops.loaded_libraries if Path(path).parts[-2:] == ("qao", "_C.so")}
        first = ", ".join(sorted(others - {str(library.resolve())})) or "a place that torch does not know"
        raise ImportError(
            f"this process has loaded another copy of qao already, from {first}, so that {library} cannot be used. "
            "Start a new process, with one of them on sys.path."
        )


_load()

from .dense import dense_fp4, dense_fp8, dense_int4, dense_int8  # noqa: E402  # the operators must be there
from .dense import dequantize_fp8 as dequantize_fp8  # noqa: E402
from .dense import dequantize_int8 as dequantize_int8  # noqa: E402
from .fp4 import dequantize_fp4, pack_fp4, unpack_fp4  # noqa: E402, F401
from .gradients import differentiable  # noqa: E402
from .gradients import product as product  # noqa: E402

# What layers call ``product`` with. The imports below look through these.
INT4 = differentiable(torch.ops.qao.int4_mm.default, dense_int4)
INT8 = differentiable(torch.ops.qao.int8_mm.default, dense_int8)
FP8 = differentiable(torch.ops.qao.fp8_mm.default, dense_fp8)
FP4 = differentiable(torch.ops.qao.fp4_mm.default, dense_fp4)
INT8_INT8 = differentiable(torch.ops.qao.int8_int8_mm.default, dense_int8)
INT8_INT4 = differentiable(torch.ops.qao.int8_int4_mm.default, dense_int4)
FP8_FP8 = differentiable(torch.ops.qao.fp8_fp8_mm.default, dense_fp8)
FP8_INT4 = differentiable(torch.ops.qao.fp8_int4_mm.default, dense_int4)

from . import fake, transforms  # noqa: E402, F401  # they register
from .activation_operators import (  # noqa: E402, F401
    add_rms_norm_int4_mm,
    add_rms_norm_quantize,
    fp8_quantize,
    fp8_scaled_mm,
    hadamard,
    int8_quantize,
    int8_scaled_mm,
    rms_norm_quantize,
    silu_mul_quantize,
    swiglu_quantize,
)
from .expert_rows import expert_sort as expert_sort  # noqa: E402
from .expert_rows import expert_sum as expert_sum  # noqa: E402
from .expert_rows import expert_topk as expert_topk  # noqa: E402
from .grouped import GROUPED as GROUPED  # noqa: E402
from .grouped import grouped_product as grouped_product  # noqa: E402
from .grouped_mm import (  # noqa: E402, F401
    fp4_grouped_mm,
    fp8_fp8_grouped_mm,
    fp8_grouped_mm,
    fp8_int4_grouped_mm,
    int4_grouped_mm,
    int8_grouped_mm,
    int8_int4_grouped_mm,
    int8_int8_grouped_mm,
)
from .invariance import asked  # noqa: E402
from .norm_silu import add_rms_norm as add_rms_norm  # noqa: E402
from .norm_silu import silu_mul as silu_mul  # noqa: E402
from .norm_silu import swiglu as swiglu  # noqa: E402
from .weight_operators import (  # noqa: E402, F401
    dequantize_int4,
    gptq_columns,
    int4_embedding,
    int8_embedding,
    largest_magnitude,
    load_weight_,
    pack_int4,
    quantize_blocks,
    quantize_fp4,
    quantize_groups,
    quantize_weight_,
    unpack_int4,
)

torch.fx.wrap("product")  # a node of fx.symbolic_trace, as the choice in it is made when the graph runs

# ---- rows of W, by format: (ids [...], weight, scales, *constants, dtype) -> [..., K] --------------------------------

EMBEDDINGS: dict[str, Callable[..., Tensor]] = {
    "int4": int4_embedding,
    "int8": int8_embedding,
}

# ---- products: as the raw operators, and differentiable --------------------------------------------------------------


def int4_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
) -> Tensor:
    """y = x · Wᵀ + bias with an int4 weight."""
    constants = out_features, in_features, group_size, *asked(batch_invariant)
    return product(INT4, constants, x, weight, scales, bias)


def int8_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    batch_invariant: bool = False,
) -> Tensor:
    """y = x · Wᵀ + bias with an int8 weight."""
    return product(INT8, asked(batch_invariant), x, weight, scales, bias)


def fp8_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    batch_invariant: bool = False,
) -> Tensor:
    """y = x · Wᵀ + bias with an fp8 weight."""
    return product(FP8, asked(batch_invariant), x, weight, scales, bias)


def fp4_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    batch_invariant: bool = False,
) -> Tensor:
    """y = x · Wᵀ + bias with an fp4 weight: ``group_size`` 32 is MXFP4, 16 NVFP4."""
    constants = out_features, in_features, group_size, *asked(batch_invariant)
    return product(FP4, constants, x, weight, scales, bias)


def int8_int8_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    weight_sums: Tensor | None = None,
    batch_invariant: bool = False,
    x_rotation: int = 0,
) -> Tensor:
    """y = x̂ · Wᵀ + bias with an int8 weight and x̂ = x rounded to int8, a scale per token.

    ``weight_sums``: float32 [N], sums over k of the dequantised W, makes the rounding of x asymmetric (with a zero
    point per token); None: symmetric. ``x_rotation``: ``hadamard(x, x_rotation)`` is what is rounded, and W is one of
    as many columns rotated alike; 0: x itself.
    """
    return product(INT8_INT8, asked(batch_invariant, x_rotation), x, weight, scales, bias, weight_sums)


def int8_int4_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    weight_sums: Tensor | None = None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    row_scales: Tensor | None = None,
    batch_invariant: bool = False,
    x_rotation: int = 0,
) -> Tensor:
    """y = x̂ · Wᵀ + bias with an int4 weight; x̂, ``weight_sums`` and ``x_rotation`` as for ``int8_int8_mm``.

    ``row_scales``: float32 [N], of which the scales of a symmetric W are whole numbers, -15 to 16 but 0, each of its
    row's. The result is the same but for rounding; Hopper multiplies many tokens without scaling sums of each group.
    Others than those give wrong numbers there.
    """
    constants = out_features, in_features, group_size
    others = asked(batch_invariant, x_rotation)
    last = (*constants, row_scales, *others) if row_scales is not None or others else constants
    return product(INT8_INT4, last, x, weight, scales, bias, weight_sums)


def fp8_fp8_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None = None,
    x_group_size: int = -1,
    fast_accum: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """y = x̂ · Wᵀ + bias with an fp8 weight and x̂ = x rounded to e4m3.

    ``x_group_size``: columns of x that share a scale: -1 all of a token, 128 a block (with W scaled by blocks), 0 all
    of x. ``x_scale``: float32 [1], that one scale if it is known beforehand. ``fast_accum``: GPUs may sum more than
    128 columns in the tensor core's short accumulator.
    """
    return product(FP8_FP8, (x_group_size, fast_accum, *asked(batch_invariant)), x, weight, scales, bias, x_scale)


def fp8_int4_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out_features: int = 0,
    in_features: int = 0,
    group_size: int = 0,
    row_scales: Tensor | None = None,
    batch_invariant: bool = False,
    fast_accum: bool = False,
) -> Tensor:
    """y = x̂ · Wᵀ + bias with an int4 weight and x̂ = x rounded to e4m3, a scale per token.

    ``row_scales``: float32 [N], of which the scales of a symmetric W are powers of two, 2^-14 to 32, of either sign,
    each of its row's. As in ``int8_int4_mm``. ``fast_accum``: with these, or one group a row, GPUs may sum more than
    128 columns in the tensor core's short accumulator.
    """
    constants = out_features, in_features, group_size
    others = asked(batch_invariant, fast_accum)
    last = (*constants, row_scales, *others) if row_scales is not None or others else constants
    return product(FP8_INT4, last, x, weight, scales, bias)
