"""PyTorch's operators with 8-bit weights.

Operators with quantized activations get them as a torch user would produce them: on a CPU from torch's own operators,
on a GPU from qao's kernel, since torch without a compiler would launch one kernel per step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..weights import RowWeight
from . import Peer


class TorchInt8(Peer):
    """``torch.ops.aten._weight_int8pack_mm``: int8 weights, float activations."""

    name = "torch_int8"
    max_m = 128

    def __init__(self, weight: RowWeight) -> None:
        self.tensors = (weight.q, weight.scales.bfloat16())

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, *tensors)


class IntMm(Peer):
    """``torch._int_mm`` between per-token quantization and scaling."""

    name = "int_mm"

    def __init__(self, weight: RowWeight) -> None:
        self.tensors = (weight.q, weight.scales)

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        weight, scales = tensors
        if x.is_cuda:
            q, x_scales, _ = torch.ops.qao.int8_quantize(x, True)
        else:
            x_scales = x.abs().amax(-1, keepdim=True).float() / 127
            q = (x / x_scales).round_().to(torch.int8)
        return torch._int_mm(q, weight.t()).float().mul_(x_scales).mul_(scales).bfloat16()


class QLinear(Peer):
    """``torch.ops.onednn.qlinear_pointwise``, which supports only a per-tensor scale of x."""

    name = "qlinear"

    @staticmethod
    def unavailable(device: str) -> str | None:
        return None if device == "cpu" else "CPU only"

    def __init__(self, weight: RowWeight) -> None:
        packed = torch.ops.onednn.qlinear_prepack(weight.q, None)
        self.tensors = (packed, weight.scales, torch.zeros_like(weight.scales, dtype=torch.int64))

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        weight, scales, zeros = tensors
        x_scale = x.abs().amax().item() / 127
        q = (x * (1 / x_scale)).round_().to(torch.int8)
        return torch.ops.onednn.qlinear_pointwise(
            q, x_scale, 0, weight, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
        )


class ScaledMm(Peer):
    """``torch._scaled_mm`` with scales per token and per row of W, after per-token quantization."""

    name = "scaled_mm"

    @staticmethod
    def unavailable(device: str) -> str | None:
        if device == "cpu":
            one = torch.ones(16, 16).to(torch.float8_e4m3fn)
            scales = torch.ones(16, 1)
            try:
                torch._scaled_mm(one, one.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
            except RuntimeError:
                return f"one scale for a tensor is all that torch {torch.__version__} has on a CPU"
        return None

    def __init__(self, weight: RowWeight) -> None:
        self.tensors = (weight.q, weight.scales)

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        weight, scales = tensors
        if x.is_cuda:
            q, x_scales = torch.ops.qao.fp8_quantize(x, None, -1)
        else:
            x_scales = x.abs().amax(-1, keepdim=True).float() / 448
            q = (x / x_scales).to(torch.float8_e4m3fn)
        return torch._scaled_mm(q, weight.t(), scale_a=x_scales, scale_b=scales[None], out_dtype=torch.bfloat16)
