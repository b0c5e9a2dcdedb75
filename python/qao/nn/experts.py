"""QuantExperts: quantized MoE experts with one stacked weight and one grouped GEMM per projection.

The forward permutes tokens by expert (a stable sort with sizes independent of the routing), runs the up projection with
a fused gather, the gate and the down projection, and combines the weighted rows of each token.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..ops.grouped_autograd import Gate
from ..schemes import PackedWeight, Scheme, stacked
from . import marker
from .eligibility import projections_of
from .gates import gate_of
from .linear import QuantLinear
from .packed_module import PackedModule, frozen

_autocasts = torch._C._is_any_autocast_enabled

_OPERATORS = {operator._schema.name.removeprefix("qao::"): operator for operator in ops.GROUPED}


def has_grouped_product(scheme: Scheme) -> bool:
    """Whether the scheme has a grouped GEMM."""
    return f"{scheme.word}_grouped_mm" in _OPERATORS


class QuantProjection(PackedModule):
    """One projection of all E experts: W [E, N, K] as frozen Parameters, y [S, N] for rows sorted by expert.

    Attributes:
        qweight, scales, weight_sums, row_scales: as in QuantLinear, with a leading dimension of experts.
        activation_scale: float32 [1], shared by all experts; or None.
        bias: [E, N] or None; it starts frozen, and ``requires_grad_()`` makes only the bias trainable.
        experts, out_features, in_features: E, N and K.
        weight: the dequantized weights [E, N, K], computed on use.
    """

    bias: nn.Parameter | None
    needs_all = True

    def __init__(
        self,
        experts: int,
        out_features: int,
        in_features: int,
        scheme: Scheme,
        packed: PackedWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.experts = experts  # needed by the check of the packed tensors
        super().__init__(out_features, in_features, scheme, packed, dtype, bias=bias)
        self.out_features, self.in_features = out_features, in_features

    @property
    def shape(self) -> tuple[int, ...]:
        return self.experts, *self._sizes

    def forward(
        self,
        x: Tensor,
        offsets: Tensor,
        row_index: Tensor | None = None,
        router_weights: Tensor | None = None,
        gate: Gate | None = None,
    ) -> Tensor:
        """y [S, N], or [S, N / 2] with a gate; arguments as in ``qao.ops.int4_grouped_mm``, for every scheme."""
        if _autocasts():
            x = QuantLinear.autocast(x)
        tensors = self._parameters
        others = (tensors[name] for name in self.scheme.operands)
        return ops.grouped_product(
            _OPERATORS[f"{self.scheme.word}_grouped_mm"],
            self._constants,
            x,
            tensors["qweight"],  # type: ignore[arg-type]
            tensors["scales"],
            tensors["bias"],
            offsets,
            row_index,
            router_weights,
            *others,
            gate=gate,
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.scales.dtype
        kernel_dtype = torch.float32 if dtype == torch.float64 else dtype
        pairs = zip(self.qweight, self.scales, strict=True)
        weights = (self.scheme.dequantize(w, s, *self._sizes, kernel_dtype) for w, s in pairs)
        return torch.stack([weight.to(dtype) for weight in weights])

    def _expected(self, scale_dtype: torch.dtype) -> PackedWeight:
        one = super()._expected(scale_dtype)
        tensors: Any = {name: t if t is None else t.expand(self.experts, *t.shape) for name, t in one.tensors().items()}
        return PackedWeight(**tensors | {"activation_scale": one.activation_scale})

    def requires_grad_(self, requires_grad: bool = True) -> QuantProjection:
        if self.bias is not None:
            self.bias.requires_grad_(requires_grad)
        return self

    def _marker(self) -> marker.Marker:
        return super()._marker()._replace(experts=self.experts)

    def extra_repr(self) -> str:
        return (
            f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self.scheme}, scales {str(self.scales.dtype).removeprefix('torch.')}"
        )


def expert_sizes(fused: Any, weight: Tensor) -> tuple[int, int, int]:
    """E, N and K of a projection's weight [E, N, K], or [E, K, N] if transposed."""
    count, n, k = (weight.mT if fused.is_transposed else weight).shape
    return count, n, k


def _has_norm(fused: Any) -> bool:
    return getattr(fused, "has_post_expert_norm", False)  # not in transformers before 5.23


class QuantExperts(nn.Module):
    """The quantized experts of one MoE layer: replaces fused experts of transformers 5 (docs/experts.md).

    ``forward(hidden_states [T, K], top_k_index [T, k], top_k_weights [T, k])`` returns [T, K], the weighted sum of the
    outputs of each token's experts. Indices of E or more are experts of other ranks and contribute zero.

    Attributes:
        up, down: the projections, QuantProjection; with a gate, ``up`` is the merged gate and up projection. The names
            differ from transformers', because its loaders would split tensors with those names.
        num_experts: E.
    """

    def __init__(self, origin: nn.Module, up: QuantProjection, down: QuantProjection) -> None:
        """``origin``: the original fused experts, which still provide the gate or activation function."""
        super().__init__()
        self.up, self.down = up, down
        self.num_experts = down.experts
        if _has_norm(origin):
            self.post_expert_norm = origin.post_expert_norm
        # In a tuple, not a child module: its tensors are removed, and transformers would initialize them again.
        self._origin = (_emptied(origin),)
        self._gate = gate_of(self._origin[0], down.in_features)
        self.train(origin.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        offsets, row_index, places = ops.expert_sort(top_k_index, self.num_experts)
        (origin,) = self._origin
        rows = self.up(hidden_states, offsets, row_index, gate=self._gate)
        if self._gate is None:
            rows = origin._apply_gate(rows) if origin.has_gate else origin.act_fn(rows)
        rows = self.down(rows, offsets)
        if _has_norm(origin):
            norm: Any = self.post_expert_norm
            rows = norm(rows)
        together: Tensor = ops.expert_sum(rows.contiguous(), places, top_k_weights.contiguous())
        return together.to(hidden_states.dtype)

    # The weights under their original names, for models that read them.
    gate_up_proj = property(lambda self: self._weight("gate_up_proj"))
    up_proj = property(lambda self: self._weight("up_proj"))
    down_proj = property(lambda self: self._weight("down_proj"))

    def _weight(self, name: str) -> Tensor:
        fused, projection = self._origin[0], self.projections().get(name)
        if projection is None:
            raise AttributeError(f"{type(fused).__name__} has no {name}")
        return projection.weight.mT if fused.is_transposed else projection.weight

    def projections(self) -> dict[str, QuantProjection]:
        """The projections by the names of their original Parameters."""
        return dict(zip(projections_of(self._origin[0]), (self.up, self.down), strict=True))

    def to_float(self) -> nn.Module:
        """The original fused experts with dequantized weights, which start frozen."""
        experts: Any = self.skeleton()
        for name, projection in self.projections().items():
            weight = projection.dequantize(projection.dtype)
            experts._parameters[name] = frozen(weight.mT.contiguous() if experts.is_transposed else weight)
            if projection.bias is not None:
                experts._parameters[f"{name}_bias"] = frozen(projection.bias.detach().to(projection.dtype, copy=True))
        return experts.train(self.training)  # type: ignore[no-any-return]

    def skeleton(self) -> nn.Module:
        """The original fused experts with the same sizes on meta, as a template."""
        experts: nn.Module = copy.copy(self._origin[0])
        experts._parameters = {}
        for name, projection in self.projections().items():
            count, n, k = projection.shape
            shape = (count, k, n) if experts.is_transposed else (count, n, k)
            experts._parameters[name] = frozen(torch.empty(shape, dtype=projection.dtype, device="meta"))
            if projection.bias is not None:
                experts._parameters[f"{name}_bias"] = frozen(torch.empty_like(projection.bias, device="meta"))
        if _has_norm(experts):
            experts._modules = {**experts._modules, "post_expert_norm": self._modules["post_expert_norm"]}
        return experts

    def extra_repr(self) -> str:
        return f"of {type(self._origin[0]).__name__}"


def _emptied(experts: nn.Module) -> Any:
    """A copy without parameters and norm, which only computes the gate."""
    emptied = copy.copy(experts)
    emptied._parameters = {}
    emptied._modules = {name: child for name, child in experts._modules.items() if name != "post_expert_norm"}
    return emptied


def quantize_projection(
    weights: Tensor, scheme: Scheme, transposed: bool, device: torch.device | str | None, name: str
) -> PackedWeight:
    """Quantizes W [E, N, K], or [E, K, N] if transposed, expert by expert; on meta it only makes shapes.

    Raises:
        ValueError: a weight holds NaN or Inf; the message begins with ``name`` and the index of the expert.
    """
    weights = weights.detach().mT if transposed else weights.detach()
    count, n, k = weights.shape
    if weights.is_meta:
        return scheme.empty(n, k, dtype=weights.dtype, device="meta", experts=count)
    made: list[PackedWeight] = []
    errors, sizes = 0.0, 0.0
    for expert, weight in enumerate(weights):
        packed = scheme.quantize(weight if device is None else weight.to(device), f"{name}[{expert}]")
        made.append(packed._replace(relative_error=None))
        size = weight.float().square().sum().item()
        errors += (packed.relative_error or 0.0) ** 2 * size
        sizes += size
    return stacked(made, count)._replace(relative_error=(errors / sizes) ** 0.5 if sizes else 0.0)
