"""Python functions of the operators, with gradients for the operators used in training.

``torch.ops.qao.*`` are the raw operators, without autograd; the module ``raw`` has the same, with types for editors and
type checkers. This package has a function with the same name and arguments for each. The GEMMs, ``add_rms_norm``,
``silu_mul``, ``swiglu``, ``expert_topk`` and ``expert_sum`` are differentiable. Sizes everywhere: M tokens,
N = out_features, K = in_features; x [..., K], weight [N, K], y [..., N].

Arguments and result that all dense GEMMs (``*_mm``) share:
    x: [..., K], float32, float16 or bfloat16; any strides.
    weight, scales: in the format below.
    bias: [N] in a float dtype, or None.
    result: [..., N], contiguous, in x's dtype; accumulated in float32, or exactly if both operands are integers.
grouped_autograd.py documents grouped GEMMs, ``*_grouped_mm``. With ``batch_invariant``, or within the context
``batch_invariant()``, a row of the result depends on its row of x and W alone. GEMMs raise RuntimeError if a shape,
dtype, device or alignment does not fit; the message lists all operands and the remedy. Gradients go to x and bias. The
gradient of x is dy · W: quantization of x counts as the identity (straight-through).

Weights
    int4: weight and scales as ``pack_int4`` returned them, with the same ``group_size``, N and K. All three are
        optional if N is a multiple of 16 and K of 64: the operator infers them from the tensors.
    int8: weight int8 [N, K], scales float32 [N] or [1].
    fp4: weight and scales as ``pack_fp4`` returned them, with the same ``group_size``, N and K, which are optional as
        for int4.
    fp8: weight float8_e4m3fn [N, K] or its bytes as int8, scales float32 [N], [N, 1], [1] or one per 128 x 128 block,
        [ceil(N / 128), ceil(K / 128)].
    GGUF: ``gguf_mm`` and ``gguf_grouped_mm`` take a file's bytes and the type number of its blocks (gguf.py) and no
        scales.
"""

from __future__ import annotations

import torch

# ruff: isort: off
from . import library  # noqa: F401  # first: every other module looks up operators
from . import matmul
from .matmul import *  # noqa: F403
from .gguf import (
    dequantize_gguf,
    gguf_embedding,
    gguf_mm,
)
from . import raw  # noqa: F401  # a public module
from . import fake, vmap  # noqa: F401  # register fake kernels and vmap rules of the operators above
from .dequantize import (
    dequantize_fp8,
    dequantize_int8,
)
from .fp4 import (
    dequantize_fp4,
    pack_fp4,
    unpack_fp4,
)
from .attention import decode_attention
from .autograd import product
from .batch_invariant import batch_invariant
from .activation_ops import (
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
from .merged_mm import MERGED
from .moe_routing import (
    expert_sort,
    expert_sum,
    expert_topk,
)
from .grouped_autograd import (
    GROUPED,
    grouped_product,
)
from . import grouped_mm
from .grouped_mm import *  # noqa: F403
from .norm_act import (
    add_rms_norm,
    silu_mul,
    swiglu,
)
from .weight_ops import (
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

# ruff: isort: on

for _called in ("product", "gguf_mm"):  # layers call them by this module: a node of fx.symbolic_trace
    torch.fx.wrap(_called)

__all__ = [
    "GROUPED",
    "MERGED",
    "add_rms_norm",
    "add_rms_norm_int4_mm",
    "add_rms_norm_quantize",
    "batch_invariant",
    "decode_attention",
    "dequantize_fp4",
    "dequantize_fp8",
    "dequantize_gguf",
    "dequantize_int4",
    "dequantize_int8",
    "expert_sort",
    "expert_sum",
    "expert_topk",
    "fp8_quantize",
    "fp8_scaled_mm",
    "gguf_embedding",
    "gguf_mm",
    "gptq_columns",
    "grouped_product",
    "hadamard",
    "int4_embedding",
    "int8_embedding",
    "int8_quantize",
    "int8_scaled_mm",
    "largest_magnitude",
    "load_weight_",
    "pack_fp4",
    "pack_int4",
    "product",
    "quantize_blocks",
    "quantize_fp4",
    "quantize_groups",
    "quantize_weight_",
    "rms_norm_quantize",
    "silu_mul",
    "silu_mul_quantize",
    "swiglu",
    "swiglu_quantize",
    "unpack_fp4",
    "unpack_int4",
]
__all__ += matmul.__all__
__all__ += grouped_mm.__all__
