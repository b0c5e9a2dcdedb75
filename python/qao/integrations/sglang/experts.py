"""Fused experts of checkpoints that SGLang reads, computed by qao's grouped operators.

As in method.py, SGLang's method creates and loads the parameters of a layer; expert_weights.py converts them. Whether
qao serves a layer is decided before its parameters exist, since SGLang queries the method's runner early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.quantization.awq.awq import AWQMoEMethod
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsFusedMoEMethod
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
from sglang.srt.layers.quantization.gptq.gptq import GPTQMarlinMoEMethod, GPTQMoEMethod
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp8MoEMethod
from sglang.srt.layers.quantization.moe_wna16 import MoeWNA16Method
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.layers.quantization.w8a8_fp8 import W8A8FP8MoEMethod
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8MoEMethod
from sglang.srt.utils import is_cuda
from torch import Tensor, nn

from ...nn.experts import QuantProjection
from ...ops.grouped_autograd import SILU_MUL
from ..serving import common, moe
from ..serving.interface import check_class, unknown_fields
from . import WITHOUT, expert_weights
from .adapter import gate_numbers, has_paged_experts, method_of, settings
from .expert_weights import ExpertSizes, Weights
from .process import log_served, log_unsupported, missing
from .reloading import Reloading

_WEIGHTS: dict[type, Callable[[Any, nn.Module, ExpertSizes], Weights | str]] = {
    CompressedTensorsFusedMoEMethod: expert_weights.of_compressed_tensors,
    GPTQMoEMethod: expert_weights.of_gptq,
    GPTQMarlinMoEMethod: expert_weights.of_gptq,
    AWQMoEMethod: expert_weights.of_awq,
    MoeWNA16Method: expert_weights.of_moe_wna16,
    Fp8MoEMethod: expert_weights.of_fp8,
    ModelOptFp8MoEMethod: expert_weights.of_modelopt_fp8,
    W8A8FP8MoEMethod: expert_weights.of_w8a8_fp8,
    W8A8Int8MoEMethod: expert_weights.of_w8a8_int8,
}


# Properties of experts in SGLang's config, of which ``unsupported_reason`` rejects some.
_FIELDS = frozenset(
    "num_experts num_local_experts hidden_size intermediate_size_per_partition layer_id top_k num_fused_shared_experts "
    "params_dtype routing_method_type runner_backend activation is_gated apply_router_weight_on_input inplace "
    "no_combine no_combine_keep_router_weight routed_scaling_factor gemm1_alpha gemm1_beta gemm1_clamp_limit "
    "swiglu_limit gate_up_interleaved layer use_tp_all_gather_activation silu_mul_keep_fp32".split()
)


def choose(own: Any, layer: nn.Module, name: str) -> Any:
    """qao's method for the experts of SGLang's method ``own``, or ``own`` itself."""
    if not isinstance(layer, FusedMoE) or own is None or isinstance(own, UnquantizedFusedMoEMethod):
        return own
    made = common.decided("sglang", WITHOUT["experts"], _weights_of, own, layer)
    if isinstance(made, str):
        log_unsupported(f"fused experts: {made}", name)
        return own
    log_served(made.operator_name, name)
    return method_of(QaoExpertsMethod, own, layer)(own, made, name)


def _weights_of(own: Any, layer: Any) -> Weights | str:
    if type(own) not in _WEIGHTS:
        return f"weights of {type(own).__name__}"
    if reason := missing(torch.empty(0).device) or unsupported_reason(layer):
        return reason
    width = layer.intermediate_size_per_partition
    return _WEIGHTS[type(own)](own, layer, ExpertSizes(layer.hidden_size, width, width * layer.moe_tp_size))


def unsupported_reason(layer: Any) -> str | None:
    """Why experts of any format are left to SGLang; None if qao may compute them."""
    config, runner, exchange = layer.moe_runner_config, get_moe_runner_backend(), get_moe_a2a_backend()
    if type(layer) is not FusedMoE:
        return f"an unknown kind of layer ({type(layer).__name__})"
    if not runner.is_auto():
        return f"another backend was requested: {runner.value}"
    if not exchange.is_none():
        return f"tokens that {exchange.value} exchanges"
    if settings("lora").enable_lora or settings("lora").lora_paths:
        return "LoRA"
    moe_settings = settings("exec.moe")
    if moe_settings.kt_weight_path is not None or has_paged_experts() and moe_settings.enable_paged_experts:
        return "experts that are partly in CPU memory"
    if unknown := unknown_fields(config, _FIELDS):
        return unknown
    numbers = gate_numbers(config)
    if config.activation != "silu" or not config.is_gated or any(one is not None for one in numbers):
        return "a gate other than SiLU · up, or one with limits or factors"
    if layer.with_bias:
        return "biases"
    if config.apply_router_weight_on_input and config.top_k != 1:
        return "router weights that multiply the input of more than one expert"
    return "rows that the model adds itself" if config.no_combine else None


class GroupedExperts(FusedMoEMethodBase):  # type: ignore[misc]
    """A layer with projections of qao as its children ``up`` and ``down``."""

    name: str

    def create_moe_runner(self, layer: nn.Module, moe_runner_config: Any) -> None:
        self.config = moe_runner_config  # no runner: tokens already have local expert numbers

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        x, (weights, chosen, *_) = dispatch_output.hidden_states, dispatch_output.topk_output
        if self.config.apply_router_weight_on_input:
            x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        factor = self.config.routed_scaling_factor
        if factor is not None and is_cuda():  # on other devices models apply it themselves
            weights = weights * factor

        def up(x: Tensor, offsets: Tensor, row_index: Tensor) -> Tensor:
            return layer.up(x, offsets, row_index, gate=SILU_MUL)  # type: ignore[no-any-return]

        y = moe.through(x, chosen, weights, layer.num_local_experts, up, layer.down)
        return StandardCombineInput(y)


class QaoExpertsMethod(GroupedExperts):
    """SGLang's method ``own`` creates and loads the weights of a layer; qao packs and multiplies them."""

    def __init__(self, own: Any, weights: Weights, name: str) -> None:
        self.own, self.weights, self.name, self.quant_config = own, weights, name, own.quant_config
        self.reloading = Reloading(name)

    def create_weights(self, layer: Any, *sizes: Any, **named: Any) -> None:
        layer.weight_load_method = self.own  # loaders follow its layout
        self.own.create_weights(layer, *sizes, **named)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.reloading.process(layer, self._pack)

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        self.reloading.restore(layer)

    def _pack(self, layer: Any) -> None:
        width, hidden, count = layer.intermediate_size_per_partition, layer.hidden_size, layer.num_local_experts
        for name, prefix, n, k in (("up", "w13_", 2 * width, hidden), ("down", "w2_", hidden, width)):
            own = {key: one for key, one in layer._parameters.items() if key.startswith(prefix)}
            loaded = {key.removeprefix(prefix): one.data for key, one in own.items() if one is not None}
            scheme, packed = self.weights.packed(loaded, n, k)
            layer.add_module(name, QuantProjection(count, n, k, scheme, packed, None, layer.params_dtype))
            for key in own:
                del layer._parameters[key]


check_class(QaoExpertsMethod, "restore_weights_before_loading")
