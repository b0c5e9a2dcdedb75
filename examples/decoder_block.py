"""Llama-style decoder block on qao: four GEMMs instead of seven, with fused input quantization.

It computes the same as transformers' decoder layer, from which it is built:

- q, k and v are one QuantLinear, and so are gate and up: larger GEMMs use a GPU better. Scales belong to rows of W, so
  joining the rows changes no value.
- qao's operators run between the GEMMs: residual add with RMSNorm, and SiLU-multiply. On Hopper their kernels start
  before the preceding ones end (PDL). Each block adds the last output of the previous block.
- ``int4`` has one operator for a GEMM and the operations around it; for few tokens on Hopper that is one kernel.
- If activations are quantized too (``int8_int8``, ``fp8_fp8``), these operators output eight bits and scales, which
  ``*_scaled_mm`` takes directly.

``python -m bench llama`` compares it with the plain block.
"""

from __future__ import annotations

from typing import Any

import qao
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Dtype of quantized GEMM inputs, by scheme.
_PRODUCED = {"int8_int8": torch.int8, "fp8_fp8": torch.float8_e4m3fn}


class DecoderBlock(nn.Module):
    """A transformers decoder layer (Llama, Qwen2), restructured for inference with raw operators.

    Args:
        layer: the layer, with float weights.
        scheme: how to quantize its weights; None leaves them in float and uses only torch's operators. Quantized
            activations must be symmetric, with a scale per token.
    """

    def __init__(self, layer: Any, scheme: qao.Scheme | None) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = _joined(scheme, attention.q_proj, attention.k_proj, attention.v_proj)
        self.o = _joined(scheme, attention.o_proj)
        self.gate_up = _joined(scheme, mlp.gate_proj, mlp.up_proj)
        self.down = _joined(scheme, mlp.down_proj)
        self.norms = nn.ParameterList([layer.input_layernorm.weight, layer.post_attention_layernorm.weight])
        self.norms.requires_grad_(False)
        self.eps = layer.input_layernorm.variance_epsilon
        self.head_dim = attention.head_dim
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.scheme = scheme

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """x, residual: [batch, tokens, hidden], two summands of the block's input; the result has the same form.

        cos, sin: [1, tokens, head_dim]. ``cache.update(k, v)`` stores the new keys and values and returns all.
        """
        qkv, residual = self.norm_product(x, residual, self.norms[0], self.qkv)
        x = self.o(self.attention(qkv, cos, sin, cache))
        if self.scheme is not None and self.scheme.word == "int4":
            x, residual = self.int4_product(x, residual, self.norms[1], self.gate_up, gated=True)
            return self.down(x), residual
        gate_up, residual = self.norm_product(x, residual, self.norms[1], self.gate_up)
        return self.gated_product(*gate_up.chunk(2, dim=-1), self.down), residual

    def norm_product(self, x: Tensor, residual: Tensor, weight: Tensor, linear: nn.Module) -> tuple[Tensor, Tensor]:
        """linear(rms_norm(x + residual)), and that sum."""
        if self.scheme is None:
            residual = x + residual
            return linear(F.rms_norm(residual, x.shape[-1:], weight, self.eps)), residual
        if self.scheme.word == "int4":
            return self.int4_product(x, residual, weight, linear, gated=False)
        produced = _PRODUCED.get(self.scheme.word)
        if produced is None:
            y, residual = qao.ops.add_rms_norm(x, residual, weight, self.eps)
            return linear(y), residual
        q, scales, residual = torch.ops.qao.add_rms_norm_quantize(x, residual, weight, self.eps, produced)
        return _scaled_mm(linear, q, scales, x.dtype), residual

    def int4_product(
        self, x: Tensor, residual: Tensor, weight: Tensor, linear: Any, gated: bool
    ) -> tuple[Tensor, Tensor]:
        """``norm_product`` of an int4 layer; if gated, its halves are gate and up, and the result silu(gate) * up."""
        sizes = linear.out_features, linear.in_features, linear.scheme.group_size
        packed = linear.qweight, linear.scales, linear.bias
        return torch.ops.qao.add_rms_norm_int4_mm(x, residual, weight, *packed, self.eps, *sizes, gated)

    def gated_product(self, gate: Tensor, up: Tensor, linear: nn.Module) -> Tensor:
        """linear(silu(gate) * up)."""
        if self.scheme is None:
            return linear(F.silu(gate) * up)
        produced = _PRODUCED.get(self.scheme.word)
        if produced is None:
            return linear(qao.ops.silu_mul(gate, up))
        return _scaled_mm(linear, *torch.ops.qao.silu_mul_quantize(gate, up, produced), gate.dtype)

    def attention(self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: Any) -> Tensor:
        batch, tokens, _ = qkv.shape
        heads = qkv.view(batch, tokens, -1, self.head_dim).transpose(1, 2)  # [batch, heads, tokens, head_dim]
        qk, v = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        q, k = _rotated(qk, cos, sin).split([self.heads, self.kv_heads], dim=1)
        k, v = cache.update(k, v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [batch, heads, tokens, head_dim]; the halves of a head form the pairs."""
    left, right = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-right, left), dim=-1) * sin.unsqueeze(1)


def _joined(scheme: qao.Scheme | None, *linears: nn.Linear) -> nn.Module:
    """One linear layer with the concatenated outputs of ``linears``."""
    weight = torch.cat([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined if scheme is None else qao.QuantLinear.from_linear(joined, scheme)


def _scaled_mm(linear: Any, x: Tensor, x_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The GEMM of a QuantLinear with an 8-bit input."""
    if x.dtype == torch.int8:
        return torch.ops.qao.int8_scaled_mm(
            x, x_scales, None, linear.qweight, linear.scales, linear.bias, linear.weight_sums, dtype
        )
    return torch.ops.qao.fp8_scaled_mm(
        x, x_scales, linear.qweight, linear.scales, linear.bias, dtype, linear.scheme.fast_accum
    )
