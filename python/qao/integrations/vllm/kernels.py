"""qao's operators as linear kernels of vLLM, for checkpoints that vLLM reads, one class per table.

``can_implement`` rejects, with a reason, everything that would not be computed exactly as the checkpoint specifies;
vLLM then tries its own kernels. Fused experts: experts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import (
    Fp8BlockScaledMMLinearKernel,
    FP8ScaledMMLinearKernel,
    Int8ScaledMMLinearKernel,
    MPLinearKernel,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from ... import ops
from ...checkpoints.plain import group_size_of
from ...ops.batch_invariant import MODE
from ...schemes import (
    Float8DynamicActivationInt4Weight,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
    Scheme,
)
from ..serving import common
from ..serving.interface import check_class, unknown_fields
from . import WITHOUT, batch_invariance
from .process import missing

Answer = tuple[bool, str | None]
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Properties of a layer in vLLM's configs of linear kernels.
_FIELDS = frozenset(
    "full_weight_shape partition_weight_shape weight_type act_type group_size zero_points out_type "
    "is_static_input_scheme is_channelwise input_symmetric is_fused_module "
    "weight_quant_key activation_quant_key weight_shape input_dtype out_dtype".split()
)


def _answer(reason_of: Callable[[Any, Any], str | None]) -> Callable[[Any, Any], Answer]:
    """vLLM's form of ``reason_of``, which returns why a kernel does not compute a layer; None if it does."""

    @wraps(reason_of)
    def can_implement(cls: Any, c: Any) -> Answer:
        unknown = common.decided("vllm", WITHOUT["kernels.register"], unknown_fields, c, _FIELDS)
        reason = unknown or common.decided("vllm", WITHOUT["kernels.register"], reason_of, cls, c)
        return reason is None, reason

    return can_implement


class _Kernel:
    """Methods that vLLM requires of all classes except mixed precision."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        reason = missing(compute_capability)
        return reason is None, reason


class QaoMixedPrecisionKernel(MPLinearKernel):  # type: ignore[misc]
    """4-bit weights in groups or rows, 8-bit weights in rows; float, int8 or e4m3 activations."""

    @classmethod
    def get_min_capability(cls) -> int:
        return common.MIN_CAPABILITY

    @classmethod
    @_answer
    def can_implement(cls, c: Any) -> str | None:
        return missing() or _unsupported_mixed(c)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        c = self.config
        w_q, w_s, w_zp = self._get_weight_params(layer)
        bits, out = c.weight_type.size_bits, getattr(w_s, "output_dim", 0)
        k, n = c.partition_weight_shape
        scales, zeros = (w_s.data if out == 0 else w_s.data.t())[:n], None
        if c.zero_points:
            out = getattr(w_zp, "output_dim", 0)
            zeros = common.rows(w_zp.data, 4, packed_dim=getattr(w_zp, "packed_dim", 0), output_dim=out)[:n]
        if w_q.dtype == torch.int8:  # one value per byte, -8..7 (integer W4A8)
            q = (w_q.data + 8).view(torch.uint8)
        else:
            packed, out = getattr(w_q, "packed_dim", 1), getattr(w_q, "output_dim", 0)
            q = common.rows(w_q.data, bits, packed_dim=packed, output_dim=out)[:n, :k]
        scheme = _mixed_scheme(c, layer)
        made = common.integers(scheme, q, scales, zeros, c.group_size, bits=bits)
        replace_parameter(layer, self.w_q_name, made.qweight)
        replace_parameter(layer, self.w_s_name, made.scales)
        if self.w_zp_name is not None and getattr(layer, self.w_zp_name, None) is not None:
            replace_parameter(layer, self.w_zp_name, None)  # now part of the scales, or 8 everywhere
        if scheme.activations == "int8":
            replace_parameter(layer, "qao_weight_sums", made.weight_sums)
        self._operator, self._rest = common.OPERATORS[scheme.word], scheme.constants(n, k)
        self._others = [f"qao_{name}" for name in scheme.operands]

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        others = (getattr(layer, name, None) for name in self._others)
        return common.multiply(self._operator, x, weight, scales, bias, *others, *self._rest)


def _unsupported_mixed(c: Any) -> str | None:
    kind, k = c.weight_type, c.partition_weight_shape[0]
    if kind not in (scalar_types.uint4, scalar_types.uint4b8, scalar_types.int4, scalar_types.uint8b128):
        return f"weights of type {kind}; qao supports four bits, and eight without zero points"
    if kind == scalar_types.uint8b128 and c.act_type not in _FLOATS:
        return "eight bits with activations of eight bits; qao does not support them in this layout"
    if kind != scalar_types.uint8b128 and c.zero_points != (kind == scalar_types.uint4):
        return f"weights of type {kind} {'with' if c.zero_points else 'without'} zero points"
    if c.act_type not in (*_FLOATS, torch.int8, torch.float8_e4m3fn):
        return f"activations of type {c.act_type}"
    return common.unsupported_integers(kind.size_bits, c.group_size, k, c.full_weight_shape[0], c.zero_points)


def _mixed_scheme(c: Any, layer: nn.Module) -> Scheme:
    """The scheme of the layer. vLLM specifies the activation format in three places."""
    if c.weight_type.size_bits == 8:
        return Int8WeightOnly()
    size = group_size_of(c.group_size, c.partition_weight_shape[0])
    assert size is not None  # checked in _unsupported_mixed
    symmetric = not c.zero_points
    if c.act_type == torch.float8_e4m3fn:
        return Float8DynamicActivationInt4Weight(size, symmetric)
    asked = getattr(layer, "_humming_input_quant_config", None) or {}
    tokens = asked.get("num_bits") == 8 and asked.get("type") == "int" and asked.get("strategy") == "token"
    if c.weight_type == scalar_types.int4:  # CompressedTensorsW4A8Int
        symmetric_x = bool(getattr(getattr(layer, "scheme", None), "input_symmetric", True))
        return Int8DynamicActivationInt4Weight(size, symmetric, symmetric_activations=symmetric_x)
    if tokens or c.act_type == torch.int8:  # CompressedTensorsWNA8Int; VLLM_MARLIN_INPUT_DTYPE
        symmetric_x = bool(asked.get("symmetric", True))
        return Int8DynamicActivationInt4Weight(size, symmetric, symmetric_activations=symmetric_x)
    return Int4WeightOnly(size, symmetric)


class QaoInt8Kernel(_Kernel, Int8ScaledMMLinearKernel):  # type: ignore[misc]
    """W8A8 int8: scales per row or matrix; activation scale (and zero point) per token."""

    @classmethod
    @_answer
    def can_implement(cls, c: Any) -> str | None:
        return common.STATIC_INT8 if c.is_static_input_scheme else None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        w_q, w_s, _, _, w_sums = self.layer_param_names
        weight = getattr(layer, w_q).data
        widths = getattr(layer, "logical_widths", [len(weight)])
        scheme = Int8DynamicActivationInt8Weight(symmetric_activations=self.config.input_symmetric)
        made = scheme.pack(weight, common.row_scales(getattr(layer, w_s), widths))
        replace_parameter(layer, w_q, made.qweight)
        replace_parameter(layer, w_s, made.scales)
        replace_parameter(layer, w_sums, made.weight_sums)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, scales, _, _, sums = self._get_layer_params(layer)
        return common.multiply(ops.INT8_INT8, x, weight, scales, bias, sums)


class _Fp8(_Kernel, FP8ScaledMMLinearKernel):  # type: ignore[misc]
    def apply_scaled_mm(
        self,
        *,
        A: Tensor,
        B: Tensor,
        out_dtype: torch.dtype,
        As: Tensor,
        Bs: Tensor,
        bias: Tensor | None,
        output_shape: Sequence[int],
    ) -> Tensor:
        """GEMM of activations quantized by vLLM: A [M, K]; B [K, N], a view of the weight [N, K]."""
        y = ops.fp8_scaled_mm(A, As, B.t(), Bs, bias, out_dtype, False)
        return y.view(*output_shape)


class QaoFp8Kernel(_Fp8):
    """W8A8 e4m3: weight scales per row or tensor; activation scales per token or tensor."""

    @classmethod
    @_answer
    def can_implement(cls, c: Any) -> str | None:
        weight, x = c.weight_quant_key, c.activation_quant_key
        shape = weight.scale.group_shape
        by_row = shape.is_per_channel() or shape.is_per_token()
        if weight.dtype != torch.float8_e4m3fn or not (by_row or shape.is_per_tensor()):
            return f"a weight of {weight}; qao supports e4m3 with a scale per row or one for all rows"
        shape = x.scale.group_shape
        if x.dtype != torch.float8_e4m3fn or not (shape.is_per_tensor() or shape.is_per_token()):
            return f"activations of {x}; qao supports e4m3 with a scale per token or one for all tokens"
        if x.scale.static and not shape.is_per_tensor():
            return f"activations of {x}; qao supports one static scale for all of x"
        if MODE.on and shape.is_per_tensor() and not x.scale.static:
            return f"activations of {x}: a scale for all tokens depends on the batch (VLLM_BATCH_INVARIANT)"
        return None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        _, w_s, x_s, _ = self._get_layer_params(layer)
        replace_parameter(layer, self.layer_param_names[1], w_s.data.float().contiguous())
        if x_s is not None:
            replace_parameter(layer, self.layer_param_names[2], x_s.data.float().reshape(1))

    def apply_weights(self, layer: nn.Module, x: Any, bias: Tensor | None = None) -> Tensor:
        weight, scales, x_scale, x_limit = self._get_layer_params(layer)
        if x_limit is not None:  # FBGEMM's upper bound of activations, which only vLLM's own quantization applies
            return super().apply_weights(layer, x, bias)  # type: ignore[no-any-return]
        group_size = -1 if self.config.activation_quant_key.scale.group_shape.is_per_token() else 0
        y = common.multiply(ops.FP8_FP8, x, weight.t(), scales, bias, x_scale, group_size, False)
        return y.to(self.config.out_dtype)


class QaoFp8BlockKernel(_Kernel, Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
    """W8A8 e4m3: weight scales per 128 x 128 block; activation scales per token and 128 columns."""

    @classmethod
    @_answer
    def can_implement(cls, config: Any) -> str | None:
        weight, x = config.weight_quant_key, config.activation_quant_key
        shape, x_shape = weight.scale.group_shape, x.scale.group_shape
        if weight.dtype != torch.float8_e4m3fn or (shape.row, shape.col) != (128, 128):
            return f"a weight of {weight}; qao supports e4m3 in blocks of 128 x 128"
        if x.dtype != torch.float8_e4m3fn or (x_shape.row, x_shape.col) != (1, 128) or x.scale.static:
            return f"activations of {x}; with such weights qao supports dynamic e4m3 in groups of 128 columns"
        return None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        params = self._get_layer_params(layer)
        replace_parameter(layer, params.WEIGHT, params.weight.data.contiguous())
        # ue8m0 scales are powers of two, exact in float32.
        replace_parameter(layer, params.block_scale_attr, params.block_scale.data.float().contiguous())

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        scales = getattr(layer, "weight_scale_inv", None)
        scales = layer.weight_scale if scales is None else scales
        y = common.multiply(ops.FP8_FP8, x, layer.weight, scales, bias, None, 128, False)
        return y.to(self.config.out_dtype)

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        """GEMM of activations quantized by vLLM."""
        return ops.fp8_scaled_mm(A, As, B, Bs, None, self.config.out_dtype, False)


class QaoFp8WeightOnlyKernel(_Fp8):
    """W8A16 e4m3: weight scales per row, tensor or 128 x 128 block; float activations."""

    @classmethod
    @_answer
    def can_implement(cls, c: Any) -> str | None:
        weight = c.weight_quant_key
        shape = weight.scale.group_shape
        known = shape.is_per_tensor() or shape.is_per_channel() or (shape.row, shape.col) == (128, 128)
        if weight.dtype != torch.float8_e4m3fn or not (known or shape.is_per_token()):
            return f"a weight of {weight}; qao supports e4m3 by row, by block of 128 x 128, or with one scale"
        return None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self._blocks = getattr(layer, "weight_block_size", None) is not None
        self._scale_name = "weight_scale_inv" if self._blocks else self.layer_param_names[1]
        scales = getattr(layer, self._scale_name).data.float().contiguous()
        replace_parameter(layer, self._scale_name, scales)

    def apply_weights(self, layer: nn.Module, x: Any, bias: Tensor | None = None) -> Tensor:
        weight: Tensor = layer._parameters["weight"]  # type: ignore[assignment]
        weight = weight if self._blocks else weight.t()
        y = common.multiply(ops.FP8, x, weight, getattr(layer, self._scale_name), bias)
        return y.to(self.config.out_dtype)


# vLLM's tables, and the kernel that is put first.
_KERNELS: tuple[tuple[str, type], ...] = (
    ("_POSSIBLE_KERNELS", QaoMixedPrecisionKernel),
    ("_POSSIBLE_INT8_KERNELS", QaoInt8Kernel),
    ("_POSSIBLE_FP8_KERNELS", QaoFp8Kernel),
    ("_POSSIBLE_FP8_BLOCK_KERNELS", QaoFp8BlockKernel),
    ("_POSSIBLE_WFP8A16_KERNELS", QaoFp8WeightOnlyKernel),
)


def register() -> None:
    """Put these kernels before vLLM's, which selects the first suitable one."""
    tables = [(getattr(linear, table), kernel) for table, kernel in _KERNELS]  # all checks before any change
    for _, kernel in tables:
        check_class(kernel)
    for table, kernel in tables:
        for platform in (PlatformEnum.CUDA, PlatformEnum.CPU):
            kernels = table.setdefault(platform, [])
            kernels[:] = [kernel, *(other for other in kernels if other is not kernel)]
    batch_invariance.register_fp8(linear, _Fp8)
