"""Schemes: how a linear layer is stored and computed. One class a scheme; nothing else asks which one it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from . import ops
from .quantizer import quantize_int4

try:
    from . import _host
except ImportError:  # built without pybind11: layers work, kernels just have no names to show
    _host = None  # type: ignore[assignment]

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class PackedWeight(NamedTuple):
    """A quantised weight [N, K] in the layout of the scheme's kernels."""

    weight: Tensor
    scales: Tensor
    relative_error: float | None = None  # ‖W - Ŵ‖ / ‖W‖, Frobenius; None if there was no data


class Scheme(ABC):
    """How a linear layer of N = out_features by K = in_features is stored and computed."""

    word: ClassVar[str]  # the scheme's name in operators, files and reports

    @abstractmethod
    def quantize(self, weight: Tensor, name: str = "weight") -> PackedWeight:
        """Quantises and packs a float weight [N, K] on its device; ``name`` begins the message of a ValueError."""

    @abstractmethod
    def empty(self, n: int, k: int, *, dtype: torch.dtype, device: torch.device | str) -> PackedWeight:
        """Uninitialised tensors for a layer whose float weight [n, k] would have ``dtype``."""

    @abstractmethod
    def mm(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, n: int, k: int) -> Tensor:
        """y [..., n] = x [..., k] · Wᵀ + bias: the layer's forward."""

    @abstractmethod
    def dequantize(self, weight: Tensor, scales: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
        """W [n, k] in a float dtype."""

    @abstractmethod
    def kernel(
        self, m: int, n: int, k: int, *, x_dtype: torch.dtype, scale_dtype: torch.dtype, device: torch.device
    ) -> str | None:
        """Name of the kernel that multiplies x [m, k] on ``device``; None where that is not known."""


@dataclass(frozen=True)
class Int4WeightOnly(Scheme):
    """Weights in four bits, activations as they come (float32, float16 or bfloat16).

    Args:
        group_size: columns of W that share a scale: 32, 64, 128, 256, or -1 for one group per row. Smaller groups are
            more accurate and cost more: a scale and, unless symmetric, a zero point per group and row.
        symmetric: no zero points: W = (q - 8) * scale instead of (q - zero) * scale. A little smaller and faster, less
            accurate.
        scale_dtype: dtype of scales and zero points; None takes that of the layer's weight (float64: float32).
        clip_search: try several clipping ranges per group and keep the one of least squared error; False takes the
            full range.

    Raises:
        ValueError, TypeError: an argument is none of the above.
    """

    group_size: int = 128
    symmetric: bool = False
    scale_dtype: torch.dtype | None = None
    clip_search: bool = True

    word: ClassVar[str] = "int4"

    def __post_init__(self) -> None:
        if type(self.group_size) is not int or self.group_size not in (32, 64, 128, 256, -1):
            raise ValueError(
                f"Int4WeightOnly: group_size must be 32, 64, 128, 256, or -1 for one group per row, not "
                f"{self.group_size!r}"
            )
        for field in ("symmetric", "clip_search"):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(f"Int4WeightOnly: {field} must be True or False, not {getattr(self, field)!r}")
        if self.scale_dtype is not None and self.scale_dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"Int4WeightOnly: scale_dtype must be torch.float32, torch.float16, torch.bfloat16, or None for the "
                f"dtype of the layer's weight, not {self.scale_dtype!r}"
            )

    def __str__(self) -> str:
        return f"int4 g{self.group_size} {'symmetric' if self.symmetric else 'asymmetric'}"

    def _scale_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        if self.scale_dtype is not None:
            return self.scale_dtype
        return torch.float32 if weight_dtype == torch.float64 else weight_dtype

    def quantize(self, weight: Tensor, name: str = "weight") -> PackedWeight:
        q, scales, zeros, relative_error = quantize_int4(
            weight,
            self.group_size,
            symmetric=self.symmetric,
            scale_dtype=self._scale_dtype(weight.dtype),
            clip_search=self.clip_search,
            name=name,
        )
        packed, packed_scales = torch.ops.qao.pack_int4(q, scales, zeros, self.group_size)
        return PackedWeight(packed, packed_scales, relative_error)

    def empty(self, n: int, k: int, *, dtype: torch.dtype, device: torch.device | str) -> PackedWeight:
        # The packer's fake kernel knows the layout: it tells the shapes, on meta.
        groups = 1 if self.group_size == -1 else -(-k // self.group_size)
        q = torch.empty(n, k, dtype=torch.uint8, device="meta")
        scales = torch.empty(n, groups, dtype=self._scale_dtype(dtype), device="meta")
        weight, scales = torch.ops.qao.pack_int4(q, scales, None if self.symmetric else scales, self.group_size)
        return PackedWeight(torch.empty_like(weight, device=device), torch.empty_like(scales, device=device))

    def mm(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, n: int, k: int) -> Tensor:
        return ops.int4_mm(x, weight, scales, bias, n, k, self.group_size)

    def dequantize(self, weight: Tensor, scales: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
        return torch.ops.qao.dequantize_int4(weight, scales, n, k, self.group_size, dtype)  # type: ignore[no-any-return]

    def kernel(
        self, m: int, n: int, k: int, *, x_dtype: torch.dtype, scale_dtype: torch.dtype, device: torch.device
    ) -> str | None:
        if _host is None or device.type not in ("cpu", "cuda"):
            return None
        problem: dict[str, Any] = {
            "m": m,
            "n": n,
            "k": k,
            "group_size": self.group_size,
            "has_zeros": not self.symmetric,
            "has_bias": False,
            "x_dtype": str(x_dtype).removeprefix("torch."),
            "scale_dtype": str(scale_dtype).removeprefix("torch."),
            "x_aligned": True,
        }
        if device.type == "cpu":
            return str(_host.int4_cpu_kernel(**problem))
        gpu = torch.cuda.get_device_properties(device)
        plan = _host.int4_plan(
            **problem,
            compute_capability=10 * gpu.major + gpu.minor,
            num_sms=gpu.multi_processor_count,
            shared_bytes=gpu.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        )
        return str(plan["kernel"])
