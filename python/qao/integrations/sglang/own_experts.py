"""Fused experts from qao's own checkpoints in SGLang: tensors "experts.up.qweight" etc."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
from torch import nn

from ...schemes import Scheme
from ..serving import common
from ..serving.interface import check_class
from ..serving.projection import check_loaded, expert_shards, wait_for
from . import WITHOUT
from .adapter import follows_expert_locations
from .experts import GroupedExperts, unsupported_reason
from .process import missing


class QaoOwnExpertsMethod(GroupedExperts):
    """``up`` and ``down`` collect their tensors until SGLang has loaded them.

    Raises:
        NotImplementedError: qao cannot compute these experts, and no other kernel can.
    """

    def __init__(self, up: Scheme, down: Scheme, layer: nn.Module, name: str, quant_config: Any) -> None:
        self.schemes, self.name, self.quant_config = (up, down), name, quant_config
        if reason := common.decided("sglang", WITHOUT["config"], _unsupported_reason, layer):
            raise NotImplementedError(f"qao: {name}: experts in qao's own format: {reason}")

    def create_weights(self, layer: Any, *sizes: Any, **named: Any) -> None:
        width = layer.intermediate_size_per_partition * layer.moe_tp_size
        pair = expert_shards(width, layer.hidden_size, _slots(layer), layer.moe_tp_rank, layer.moe_tp_size)
        wait_for(layer, self.name, self.schemes, pair, layer.params_dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        check_loaded(layer, "SGLang")

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        raise RuntimeError(
            f"qao: {self.name}, in qao's own format, cannot load other weights while SGLang runs. Restart SGLang."
        )


def _unsupported_reason(layer: Any) -> str | None:
    check_class(QaoOwnExpertsMethod, "restore_weights_before_loading")
    return missing(torch.empty(0).device) or unsupported_reason(layer)


def _slots(layer: Any) -> list[int]:
    """The checkpoint's expert of each local slot."""
    metadata = get_global_expert_location_metadata() if follows_expert_locations(layer) else None
    slots = {}
    for expert in range(layer.num_experts if metadata is None else metadata.num_logical_experts):
        places = [expert] if metadata is None else metadata.logical_to_all_physical(layer.layer_id, expert)
        for place in map(layer._map_global_expert_id_to_local_expert_id, places):
            if 0 <= place < layer.num_local_experts:
                slots[place] = expert
    return [slots[place] for place in range(layer.num_local_experts)]
