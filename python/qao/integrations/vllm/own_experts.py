"""Fused experts from qao's own checkpoints in vLLM: tensors "experts.up.qweight" etc.

vLLM keeps a layer's experts in its child "experts.routed_experts", which gets the children ``up`` and ``down``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from ...nn.experts import QuantProjection
from ...ops.grouped_autograd import SILU_MUL, Gate
from ...schemes import Scheme
from ..serving import common
from ..serving.interface import check_class
from ..serving.projection import check_loaded, expert_shards, wait_for
from . import WITHOUT
from .grouped_experts import GroupedExperts, kernel_of, unsupported_experts

CHILD = "routed_experts"
_GPT_OSS: Gate = (1.702, 7.0, 1.0, True)  # vLLM's constants for MoEActivation.SWIGLUOAI, regardless of the config

# Classes that only load weights under their models' names.
_LAYERS = ("RoutedExperts", "GptOssRoutedExperts", "TransformersRoutedExperts")


class QaoOwnExperts(GroupedExperts):
    """Projections of any scheme, with every gate that their grouped GEMM supports."""

    up: QuantProjection
    down: QuantProjection

    @staticmethod
    def gate_of(config: Any) -> Gate | None:
        alpha, limit, beta = config.swiglu_alpha, config.swiglu_limit, config.swiglu_beta
        if config.activation == MoEActivation.SILU and alpha is None and beta is None:
            return SILU_MUL if limit is None else (1.0, limit, 0.0, False)
        if config.activation == MoEActivation.SWIGLUOAI_UNINTERLEAVE and limit is not None:
            return 1.0 if alpha is None else alpha, limit, 0.0 if beta is None else beta, False
        if config.activation == MoEActivation.SWIGLUOAI and alpha is None and limit is None and beta is None:
            return _GPT_OSS
        return None

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    def _product(
        self, second: bool, x: Tensor, weight: Tensor, offsets: Tensor, row_index: Tensor | None, n: int
    ) -> Tensor:
        if second:
            return self.down(x, offsets, row_index)  # type: ignore[no-any-return]
        return self.up(x, offsets, row_index, gate=self.gate_of(self.moe_config))  # type: ignore[no-any-return]


class QaoOwnExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """``up`` and ``down`` collect their tensors until vLLM has loaded them.

    Raises:
        NotImplementedError: qao cannot compute these experts, and no other kernel can.
    """

    def __init__(self, up: Scheme, down: Scheme, layer: Any, name: str) -> None:
        super().__init__(layer.moe_config)
        self.schemes, self.name = (up, down), name
        if reason := common.decided("vllm", WITHOUT["config.register"], _unsupported_reason, layer):
            raise NotImplementedError(f"qao: {name}: experts in qao's own format: {reason}")

    def create_weights(self, layer: Any, *sizes: Any, **named: Any) -> None:
        config, parallel = layer.moe_config, layer.moe_config.moe_parallel_config
        if config.hidden_dim != config.hidden_dim_unpadded:
            raise NotImplementedError(
                f"qao: {self.name}: packed experts are not padded, but {parallel.all2all_backend} needs "
                f"{config.hidden_dim} columns for {config.hidden_dim_unpadded}. Choose another --all2all-backend."
            )
        interleaved = config.activation == MoEActivation.SWIGLUOAI
        sizes, shard = (config.intermediate_size, config.hidden_dim), (parallel.tp_rank, parallel.tp_size)
        pair = expert_shards(*sizes, _slots(layer), *shard, interleaved=interleaved)
        wait_for(layer, self.name, self.schemes, pair, layer.params_dtype, biases=config.has_bias)
        layer.load_weights = partial(_load, layer)  # vLLM's loader knows only "w13_…" and "w2_…"

    def process_weights_after_loading(self, layer: Any) -> None:
        check_loaded(layer, "vLLM")
        self.moe_quant_config = FusedMoEQuantConfig.make()
        experts = QaoOwnExperts(moe_config=self.moe, quant_config=self.moe_quant_config)
        experts.up, experts.down = layer.up, layer.down
        self.moe_kernel = kernel_of(experts, layer._expert_routing_tables())

    def get_fused_moe_quant_config(self, layer: nn.Module) -> Any:
        return self.moe_quant_config

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        return self.moe_kernel.apply(  # type: ignore[no-any-return]
            hidden_states=x,
            w1=layer.up.qweight,
            w2=layer.down.qweight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )


def _unsupported_reason(layer: Any) -> str | None:
    """Why qao cannot compute these experts; None if it can."""
    if type(layer).__name__ not in _LAYERS:
        return f"an unknown kind of layer ({type(layer).__name__})"
    if layer.expert_map_manager.num_fused_shared_experts:
        return "shared experts fused with them"
    check_class(QaoOwnExpertsMethod)
    return unsupported_experts(QaoOwnExperts, layer.moe_config, None, None)


def _slots(layer: Any) -> list[int]:
    """The checkpoint's expert of each local slot."""
    number_of = layer.expert_map_manager.map_global_to_local
    places = {number_of(expert): expert for expert in range(layer.global_num_experts)}
    return [places[place] for place in range(layer.local_num_experts)]


def _load(layer: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Replacement of ``RoutedExperts.load_weights``: loads tensors "up.qweight" etc. and yields the loaded names."""
    for name, tensor in weights:
        name = name.removeprefix(f"{CHILD}.")
        key, _, one = name.partition(".")
        target: Any = getattr(layer._modules.get(key), "_parameters", {}).get(one)
        if not hasattr(target, "weight_loader"):
            raise ValueError(
                f"qao: {layer.layer_name}: {name} cannot be loaded. Packed experts accept no other weights "
                "while vLLM runs: restart it."
            )
        target.weight_loader(target, tensor)
        yield name
