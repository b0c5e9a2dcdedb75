"""QuantLinear: a linear layer with a quantized weight. Its forward is one operator call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops import modes
from ..schemes import PackedWeight, Scheme
from .attributes import carry_attributes
from .eligibility import is_linear, unsupported_bias, unsupported_reason
from .packed_module import PackedModule, Sharded, frozen

_autocasts = torch._C._is_any_autocast_enabled


def class_of_linear(linear: nn.Module) -> str:
    """Class name by which other packages' loaders select layers."""
    return "Linear" if isinstance(linear, Sharded) else type(linear).__name__


def linear_weight(linear: nn.Module) -> Tensor:
    """The weight [N, K] of a module for which ``is_linear`` holds."""
    weight: Tensor = linear.weight.detach()  # type: ignore[operator]
    return weight if isinstance(linear, nn.Linear) else weight.t()  # Conv1D


class QuantLinear(PackedModule):
    """y [..., N] = x [..., K] · Wᵀ + bias with a quantized W; drop-in for nn.Linear.

    Create one with ``from_linear``, ``from_quantized``, or with ``empty`` before loading a checkpoint. All tensors
    except the bias are frozen Parameters: they move with the module, but ``.to(dtype)``, ``.half()`` and similar calls
    do not change their dtypes. ``bias`` is an ordinary Parameter that starts frozen: ``layer.requires_grad_()`` makes
    only the bias trainable.

    Attributes:
        qweight, scales: tensors in the layout of the scheme's kernels.
        weight: the dequantized weight [N, K], for models that read it; computed on use.
        weight_sums: float32 [N], sums over k of W, for asymmetric activation quantization; otherwise None.
        activation_scale: float32 [1], the static activation scale; None if dynamic.
        row_scales: float32 [N], the row scales of two-level scales; otherwise None.
        bias: [N] or None.
        in_features, out_features: K and N.
        dtype: of the float weight it replaces; ``.to(dtype)`` changes it.
        scheme: the quantization scheme.
        stands_for: name of the replaced class: "Linear", transformers' "Conv1D", or a subclass.
    """

    bias: nn.Parameter | None
    stands_for = "Linear"
    needs_all = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: Scheme,
        packed: PackedWeight,
        bias: Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if bias is not None and (unsupported := unsupported_bias(bias, out_features)):
            raise ValueError(f"QuantLinear: {in_features} to {out_features} features: {unsupported}")
        given = packed.scales if bias is None else bias
        super().__init__(out_features, in_features, scheme, packed, dtype or given.dtype, bias=bias)
        self.in_features = in_features
        self.out_features = out_features
        self._mm = scheme.mm

    @classmethod
    @modes.neutral(defaults=False)
    def empty(
        cls,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        scheme: Scheme,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantLinear:
        """A layer of uninitialized tensors; ``dtype`` is that of the bias and of the float weight it replaces.

        Raises:
            ValueError: a size is not a positive integer.
        """
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if type(size) is not int or size < 1:
                raise ValueError(f"QuantLinear.empty: {name} must be a positive int, not {size!r}")
        device = torch.get_default_device() if device is None else device
        dtype = dtype or torch.get_default_dtype()
        packed = scheme.empty(out_features, in_features, dtype=dtype, device=device)
        given = torch.empty(out_features, device=device, dtype=dtype) if bias else None
        return cls(in_features, out_features, scheme, packed, given, dtype)

    @classmethod
    @modes.neutral()
    def from_linear(
        cls, linear: nn.Module, scheme: Scheme, *, device: torch.device | str | None = None, name: str = "linear"
    ) -> QuantLinear:
        """Quantizes an nn.Linear or a Conv1D of transformers; ``linear`` itself is not modified.

        Args:
            linear: the layer. If it is on meta, the result is on meta too, without data.
            scheme: for example ``Int4WeightOnly()``.
            device: device of quantization and of the result; None: the weight's device.
            name: prefix of error messages.

        Raises:
            TypeError: ``linear`` is not a linear layer, or ``scheme`` is not a scheme.
            ValueError: ``linear`` does more than a plain linear layer (custom forward, hooks, parametrizations), its
                weight holds NaN or Inf, or it is on meta and ``device`` is not.
        """
        if not isinstance(scheme, Scheme):
            raise TypeError(f"QuantLinear: scheme must be a Scheme such as qao.Int4WeightOnly(), not {scheme!r}")
        if not is_linear(linear):
            raise TypeError(f"QuantLinear: {name} must be an nn.Linear, not {type(linear).__name__}")
        if unsupported := unsupported_reason(linear):
            raise ValueError(f"QuantLinear: {name} cannot be quantized: {unsupported}")
        return cls.from_packed(linear, scheme, pack_weight(linear_weight(linear), scheme, device, name))

    @classmethod
    def from_packed(cls, linear: nn.Module, scheme: Scheme, packed: PackedWeight) -> QuantLinear:
        """The layer that replaces ``linear``, with a weight from ``pack_weight``."""
        weight = linear_weight(linear)
        out_features, in_features = weight.shape
        bias = kernel_bias(linear._parameters["bias"], packed.qweight.device)
        made = cls(in_features, out_features, scheme, packed, bias, weight.dtype).train(linear.training)
        made.stands_for = class_of_linear(linear)
        carry_attributes(linear, made)
        return made

    @classmethod
    @modes.neutral()
    def from_quantized(
        cls,
        q: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        scheme: Scheme,
        dtype: torch.dtype | None = None,
    ) -> QuantLinear:
        """A layer from an already quantized weight, W = (q - zero) * scale, without requantization.

        Args:
            q, scales, zeros: unpacked codes [N, K], scales and zero points of its groups: see ``Scheme.pack``.
            bias: [N] or None.
            scheme: their scheme, for example ``Int8DynamicActivationInt4Weight(group_size=32, symmetric=True)``.
            dtype: of the float weight it replaces; None: that of the bias, or of the scales.

        Raises:
            ValueError: a shape or dtype does not fit the scheme.
        """
        packed = scheme.pack(q, scales, zeros)
        n, k = packed.sizes or q.shape
        return cls(k, n, scheme, packed, kernel_bias(bias, q.device), dtype)

    def to_float(self, weight: nn.Parameter | None = None) -> nn.Module:
        """An nn.Linear, or the original Conv1D, with the dequantized weight in ``dtype``; it starts frozen.

        ``weight``: the Parameter to use, if a tied module has already dequantized it.
        """
        linear: nn.Module = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        own = self.dequantize(self.dtype) if weight is None else weight
        if self.stands_for == "Conv1D":  # stores the weight transposed
            from transformers.pytorch_utils import Conv1D

            with torch.device("meta"):
                linear = Conv1D(self.out_features, self.in_features)
            own = own.t().contiguous() if weight is None else own
        linear.weight = frozen(own)
        if self.bias is not None:
            linear.bias = frozen(self.bias.detach().to(self.dtype, copy=True))
        carry_attributes(self, linear)
        return linear.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        if _autocasts():  # takes 0.1 µs and avoids a Python call without autocast
            x = self.autocast(x)
        # Reads the dict directly: Module.__getattr__ is Python code and takes 0.5 µs per tensor.
        tensors: dict[str, Any] = self._parameters
        if "bias" not in tensors:  # pruned, computed by a parametrization, or an attribute of a replica
            tensors = {**self.packed.tensors(), "bias": self.bias}
        return self._mm(x, tensors, self._constants)

    @staticmethod
    def autocast(x: Tensor) -> Tensor:
        """x with the cast that autocast applies to the input of F.linear, which excludes float64."""
        # Autocast does not support the meta device. The operator rejects an x that is not a tensor.
        if isinstance(x, Tensor) and not x.is_meta and x.dtype != torch.float64:
            device_type = x.device.type
            if torch.is_autocast_enabled(device_type):
                return x.to(torch.get_autocast_dtype(device_type))
        return x

    def requires_grad_(self, requires_grad: bool = True) -> QuantLinear:
        """Applies only to the bias: all other tensors stay frozen."""
        if self.bias is not None:
            self.bias.requires_grad_(requires_grad)
        return self

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self.scheme}, scales {str(self.scales.dtype).removeprefix('torch.')}"
        )


@modes.neutral()
def pack_weight(
    weight: Tensor, scheme: Scheme, device: torch.device | str | None, name: str, importance: Tensor | None = None
) -> PackedWeight:
    """Quantizes a weight [N, K] on ``device`` (None: its device); on meta it only makes shapes."""
    if not weight.is_meta:
        return scheme.quantize(weight if device is None else weight.to(device), name, importance)
    if device is not None and torch.device(device).type != "meta":
        raise ValueError(
            f"{name}: the weight is on meta and has no data to quantize on {device}. Load the model first."
        )
    n, k = weight.shape
    return scheme.empty(n, k, dtype=weight.dtype, device="meta")


def kernel_bias(bias: Tensor | None, device: torch.device) -> Tensor | None:
    if bias is None:
        return None
    if bias.is_meta:  # the model is being loaded, and the bias comes later
        device = bias.device
    dtype = torch.float32 if bias.dtype == torch.float64 else bias.dtype  # kernels do not support float64
    return bias.detach().to(device, dtype)
